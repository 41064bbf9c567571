// What does int8_linear_tile.h need of AVX-512? Vectors of one whole tile row: 16 outputs.
//
// Included inside the anonymous namespace of int8_linear_{avx512vnni,avx512bf16,amx}.cpp; MLSPEC_INT8_VBMI says that
// vpermb is at hand.

#include "../planes/planes_linear_zmm.h"

struct Isa {
  using Bits = Zmm;
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kVectors = 1, kMaxTokens = 12;
  static constexpr bool kSigned = false;
  static constexpr int tiles_for(int tokens) { return tokens <= 5 ? 2 : 1; }  // chains of dots, streams of memory

  static Int broadcast(int32_t i) { return _mm512_set1_epi32(i); }
  static Int low_products(Int a, Int b) { return _mm512_dpwssd_epi32(_mm512_setzero_si512(), a, b); }
  static Int minus(Int a) {  // in the lower int16, the upper one zero
    return _mm512_maskz_sub_epi16(0x55555555u, _mm512_setzero_si512(), a);
  }
  static Int load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
  static Float zeros() { return _mm512_setzero_ps(); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float times(Float v, float scalar) { return _mm512_mul_ps(v, _mm512_set1_ps(scalar)); }
  static Float half(Float v) { return _mm512_fnmadd_ps(v, _mm512_set1_ps(0.5f), v); }
  static Float power(Int i) { return _mm512_castsi512_ps(_mm512_slli_epi32(i, 23)); }
  static Float to_float(Int i) { return _mm512_cvtepi32_ps(i); }
  static Float load_float16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static void prefetch(const uint8_t* block) {
    for (int line = 0; line < 4; ++line) _mm_prefetch((const char*)block + 64 * line, _MM_HINT_T0);
  }

  template <class Format>
  struct Unpack {
    __m512i mask = _mm512_set1_epi8(15), table;
    explicit Unpack(const mlspec_linear_args& a) {
      if constexpr (Format::kUsesTable) {
        alignas(16) int8_t values[16];
        Format::fill(a, values);
        table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)values));
      }
    }
    __m512i low(__m512i bytes) const {
      if constexpr (!Format::kUsesTable) return _mm512_and_si512(bytes, mask);
#if defined(MLSPEC_INT8_VBMI)
      return _mm512_permutexvar_epi8(bytes, table);  // reads the low 6 bits of an index; the table repeats every 16
#else
      return _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, mask));
#endif
    }
    __m512i high(__m512i bytes) const { return low(_mm512_srli_epi16(bytes, 4)); }
  };

  // Four rows of 64 bytes: two operands each; every token's chain moves on before the next operand is needed.
  template <class Format, int N>
  static inline __attribute__((always_inline)) void add_block(const Unpack<Format>& unpack, const uint8_t* weight,
                                                              const int8_t* x, Int (&dots)[N]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i bytes = _mm512_loadu_si512(weight + 64 * j);
      const __m512i low = unpack.low(bytes), high = unpack.high(bytes);
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) dot(dots[t], low, x + 32 * t + 8 * j);
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) dot(dots[t], high, x + 32 * t + 8 * j + 4);
    }
  }
  // Operands that lie in registers: four bytes of operand k meet x[32 t + 4 k] and on.
  template <class Format, int N>
  static inline __attribute__((always_inline)) void add_operands(const Int (&operands)[8], const int8_t* x, Int (&dots)[N]) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) dot(dots[t], operands[k], x + 32 * t + 4 * k);
    }
  }
  static void dot(__m512i& dots, __m512i codes, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    dots = _mm512_dpbusd_epi32(dots, codes, _mm512_set1_epi32(four));
  }
};
