// Which operations on bits of planes has AVX2, for planes_linear_nibbles.h?
//
// Included inside the anonymous namespaces of planes_linear_avx2.cpp and lut_linear_avx2.cpp.

struct YmmBits {
  using Int = __m256i;

  static Int load_plane(const uint8_t* block) { return _mm256_loadu_si256((const __m256i*)block); }
  static Int shift_left(Int v, int count) { return _mm256_sll_epi16(v, _mm_cvtsi32_si128(count)); }
  template <int k> static Int shift_left(Int v) { return _mm256_slli_epi16(v, k); }
  template <int k> static Int shift_right(Int v) { return _mm256_srli_epi16(v, k); }
  template <int mask>
  static Int choose(Int a, Int b) {
    const Int chosen = _mm256_set1_epi16(static_cast<int16_t>(mask));
    return _mm256_or_si256(_mm256_and_si256(chosen, a), _mm256_andnot_si256(chosen, b));
  }
  template <int k, int mask>
  static void exchange(Int& a, Int& b) {
    const Int kept = _mm256_set1_epi16(static_cast<int16_t>(mask));
    const Int different = _mm256_andnot_si256(kept, _mm256_xor_si256(a, shift_right<k>(b)));
    a = _mm256_xor_si256(a, different);
    b = _mm256_xor_si256(b, shift_left<k>(different));
  }
};
