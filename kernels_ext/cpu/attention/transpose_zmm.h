// How do 16 rows of 16 words become columns with AVX-512? Included inside the anonymous namespaces of attention_avx512*.cpp
// and attention_amx.cpp.

// to[c * to_stride + r] = word c of the row at rows + r * stride. Loads put rows r, r + 4, r + 8 and r + 12 side by side, so
// that transposing 4 x 4 words inside of 128 bits is all that is left.
inline void transpose_words(const char* rows, int64_t stride, uint32_t* to, int64_t to_stride) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const auto quarter = [&](int r) { return _mm_loadu_ps(reinterpret_cast<const float*>(rows + r * stride) + 4 * c); };
    __m512 in[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      in[i] = _mm512_castps128_ps512(quarter(i));
      in[i] = _mm512_mask_broadcast_f32x4(in[i], 0x00F0, quarter(i + 4));
      in[i] = _mm512_mask_broadcast_f32x4(in[i], 0x0F00, quarter(i + 8));
      in[i] = _mm512_mask_broadcast_f32x4(in[i], 0xF000, quarter(i + 12));
    }
    const auto lower = [&](int i) { return _mm512_castps_pd(_mm512_unpacklo_ps(in[i], in[i + 1])); };
    const auto upper = [&](int i) { return _mm512_castps_pd(_mm512_unpackhi_ps(in[i], in[i + 1])); };
    const __m512d low[2] = {lower(0), lower(2)}, high[2] = {upper(0), upper(2)};
    uint32_t* const out = to + 4 * c * to_stride;
    _mm512_storeu_pd(out, _mm512_unpacklo_pd(low[0], low[1]));
    _mm512_storeu_pd(out + to_stride, _mm512_unpackhi_pd(low[0], low[1]));
    _mm512_storeu_pd(out + 2 * to_stride, _mm512_unpacklo_pd(high[0], high[1]));
    _mm512_storeu_pd(out + 3 * to_stride, _mm512_unpackhi_pd(high[0], high[1]));
  }
}
