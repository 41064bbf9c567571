// What do the AVX-512 forms of the 4-bit linear share? Vectors of one whole tile row, 16 outputs, and its bytes.
//
// Included inside the anonymous namespace of w4a16_linear_{avx512vnni,avx512bf16,amx}.cpp.

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
  static void prefetch(const uint8_t* block) {
    for (int line = 0; line < 4; ++line) _mm_prefetch((const char*)block + 64 * line, _MM_HINT_T0);
  }

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

// Nibbles to bfloat16, two neighbours of in_features in each lane: what vdpbf16ps and the B tile of tdpbf16ps take.
template <class Format>
struct UnpackPairs {
  __m512i table, order;
  explicit UnpackPairs(const mlspec_linear_args& a) {
    alignas(64) uint16_t values[32];
    for (int i = 0; i < 32; ++i) {
      const float value = Format::value(a, i);  // 6 significant bits at most: exact in bfloat16
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      values[i] = static_cast<uint16_t>(bits >> 16);
    }
    table = _mm512_load_si512(values);
    order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  }
  // 64 bytes, eight elements of 16 outputs. An output's bytes 0 1 2 3, in the order 0 2 1 3, are words whose lower and
  // upper bytes index elements (0, 1) and (2, 3), their high nibbles (4, 5) and (6, 7). vpermw reads 5 bits of an index.
  void row(const uint8_t* weight, Zmm::Zeros zeros, __m512i (&pairs)[4]) const {
    __m512i low, high;
    Zmm::split<Format>(_mm512_shuffle_epi8(_mm512_loadu_si512(weight), order), zeros, low, high);
    pairs[0] = _mm512_permutexvar_epi16(low, table);
    pairs[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 8), table);
    pairs[2] = _mm512_permutexvar_epi16(high, table);
    pairs[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(high, 8), table);
  }
};
