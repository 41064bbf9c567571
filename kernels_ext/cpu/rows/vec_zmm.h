// What are sixteen floats with AVX-512? One register.
//
// Included inside the anonymous namespaces of {row_ops,attention}_<isa>.cpp.

constexpr int kLanes = 16;

struct Mask {
  __mmask16 m;
};

inline __mmask16 first_lanes(int64_t n) { return n <= 0 ? 0 : n >= kLanes ? 0xFFFF : (1u << n) - 1; }

// 32 nibbles as bytes, the lower one of a byte first.
inline __m256i nibbles(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), four = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, four), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), four);
  return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
}

struct Vec {
  __m512 v;
  static constexpr int kTile = 4;   // rows, and Vecs of a row, of a tile of products: 16 sums and 4 factors of 32 registers
  static Vec all(float x) { return {_mm512_set1_ps(x)}; }
  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
  static Vec load_bfloat16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Vec load_float16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Vec load_int8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  // to: what `table` holds for 32 nibbles, the lower one of a byte first
  static void look_up_nibbles(Vec table, const uint8_t* p, Vec (&to)[2]) {
    const __m256i codes = nibbles(p);
    to[0] = {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes)), table.v)};
    to[1] = {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1)), table.v)};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_first(float* p, int n) const { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
  void store_bfloat16(uint16_t* p) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), lowest), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(kept));
  }
  void store_float16(uint16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store_int8(int8_t* p) const {  // of -127.5 to 127.5, to nearest even
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  static float first(Vec a) { return _mm512_cvtss_f32(a.v); }
  static __m256 upper_half(__m512 v) { return _mm512_castps512_ps256(_mm512_shuffle_f32x4(v, v, 0x0E)); }
  static float sum(Vec a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float largest(Vec a) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static Mask lanes_between(int64_t begin, int64_t end) {
    return {static_cast<__mmask16>(first_lanes(end) & ~first_lanes(begin))};
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec neg_fma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where one is NaN
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec copy_sign(Vec a, Vec sign) {
  const __m512 top = _mm512_set1_ps(-0.f);
  return {_mm512_or_ps(_mm512_andnot_ps(top, a.v), _mm512_and_ps(top, sign.v))};
}
inline Vec times_power_of_two(Vec x, Vec, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask equal(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask is_nan(Vec a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_mov_ps(no.v, m.m, yes.v)}; }
inline uint32_t bits(Mask m) { return m.m; }
