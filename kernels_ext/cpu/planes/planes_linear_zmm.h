// What do the AVX-512 forms of the bit-plane linear share? Bits of 16 outputs in a register, pairs of bfloat16 from nibbles.
//
// Included inside the anonymous namespaces of bitplane_linear_{avx512vnni,avx512bf16,amx}.cpp.

struct Zmm {
  using Float = __m512;
  using Int = __m512i;
  static constexpr int kVectors = 1, kMaxTokens = 12;

  static Float zeros() { return _mm512_setzero_ps(); }
  static Float set(float scalar) { return _mm512_set1_ps(scalar); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float load_float16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }

  static Int load_plane(const uint8_t* block) { return _mm512_loadu_si512(block); }
  template <int k> static Int shift_left(Int v) { return _mm512_slli_epi16(v, k); }
  template <int k> static Int shift_right(Int v) { return _mm512_srli_epi16(v, k); }
  template <int mask>
  static Int choose(Int a, Int b) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<int16_t>(mask)), a, b, 0xCA);
  }
  template <int k, int mask>
  static void exchange(Int& a, Int& b) {
    const Int upper = choose<mask>(a, shift_right<k>(b));
    b = choose<mask>(shift_left<k>(a), b);
    a = upper;
  }

  static Int shift_left(Int v, int count) { return _mm512_sll_epi16(v, _mm_cvtsi32_si128(count)); }
  template <int k> static Int word_left(Int v) { return _mm512_slli_epi32(v, k); }
  template <int k> static Int word_right(Int v) { return _mm512_srli_epi32(v, k); }
  static Int word(uint32_t bits) { return _mm512_set1_epi32(static_cast<int32_t>(bits)); }
  static Float digits(Int v, Int mask, Int power) { return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(v, mask, power, 0xEA)); }
  static Float subtract(Float a, Float b) { return _mm512_sub_ps(a, b); }
};
