// What do both AVX-512 forms of w4a16_linear_tile.h share? Vectors of one whole tile row, 16 outputs, and its bytes.
//
// Included inside the anonymous namespace of w4a16_linear_{avx512vnni,avx512bf16}.cpp.

struct Zmm {
  using Float = __m512;
  using Zeros = __m512i;  // each output's zero point in its four bytes
  static constexpr int kVectors = 1, kMaxTokens = 12;
  static constexpr float kValueFactor = 1.0f;

  static Float zeros() { return _mm512_setzero_ps(); }
  static Float set(float scalar) { return _mm512_set1_ps(scalar); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512i load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
  static Float power(const uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(load_bytes(p), 23)); }
  static Float load_float16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static Zeros load_zeros(const uint8_t* p) { return _mm512_mullo_epi32(load_bytes(p), _mm512_set1_epi32(0x01010101)); }
  static void prefetch(const uint8_t* p) {
    for (int line = 0; line < 4; ++line) _mm_prefetch((const char*)p + kPrefetchBytes + 64 * line, _MM_HINT_T0);
  }
  static constexpr int kPrefetchBytes = 4096;

  // Bytes whose lower nibbles, or with zero points lower five bits, are indices; what lies above is not looked at.
  template <class Format>
  static void split(__m512i bytes, Zeros zeros, __m512i& low, __m512i& high) {
    low = bytes, high = _mm512_srli_epi16(bytes, 4);
    if constexpr (Format::kHasZeros) {
      const __m512i mask = _mm512_set1_epi8(15);
      low = _mm512_sub_epi8(_mm512_and_si512(low, mask), zeros);
      high = _mm512_sub_epi8(_mm512_and_si512(high, mask), zeros);
    }
  }
};
