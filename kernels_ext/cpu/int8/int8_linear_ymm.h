// What does int8_linear_tile.h need of AVX2? Vectors of half a tile row: 8 outputs.
//
// Included inside the anonymous namespace of int8_linear_{avx2,avxvnni,avxvnniint8}.cpp after `struct Dot`, which has
// kSigned and dot<Format>(dots, codes[8], x): dots plus the products of a block of 32.

#include "../planes/planes_linear_ymm.h"

struct Isa {
  using Bits = YmmBits;
  using Int = __m256i;
  using Float = __m256;
  static constexpr int kVectors = 2, kMaxTokens = 6;
  static constexpr bool kSigned = Dot::kSigned;
  static constexpr int tiles_for(int) { return 1; }

  static Int broadcast(int32_t i) { return _mm256_set1_epi32(i); }
  static Int low_products(Int a, Int b) { return _mm256_madd_epi16(a, b); }  // the upper int16 of a is zero
  static Int minus(Int a) { return _mm256_and_si256(_mm256_sub_epi32(_mm256_setzero_si256(), a), broadcast(0xFFFF)); }
  static Int load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
  static Float zeros() { return _mm256_setzero_ps(); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float times(Float v, float scalar) { return _mm256_mul_ps(v, _mm256_set1_ps(scalar)); }
  static Float half(Float v) { return _mm256_fnmadd_ps(v, _mm256_set1_ps(0.5f), v); }
  static Float power(Int i) { return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23)); }
  static Float to_float(Int i) { return _mm256_cvtepi32_ps(i); }
  static Float load_float16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static void prefetch(const uint8_t* block) {
    for (int line = 0; line < 4; ++line) _mm_prefetch((const char*)block + 64 * line, _MM_HINT_T0);
  }

  template <class Format>
  struct Unpack {
    __m256i mask = _mm256_set1_epi8(15), table;
    explicit Unpack(const mlspec_linear_args& a) {
      if constexpr (Format::kUsesTable) {
        alignas(16) int8_t values[16];
        Format::fill(a, values);
        table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)values));
      }
    }
    __m256i low(__m256i bytes) const {
      const __m256i codes = _mm256_and_si256(bytes, mask);
      if constexpr (!Format::kUsesTable) return codes;
      return _mm256_shuffle_epi8(table, codes);
    }
    __m256i high(__m256i bytes) const { return low(_mm256_srli_epi16(bytes, 4)); }
  };

  // A block's eight operands stay in half of the 16 registers while the tokens pass.
  template <class Format, int N>
  static inline __attribute__((always_inline)) void add_block(const Unpack<Format>& unpack, const uint8_t* weight,
                                                              const int8_t* x, Int (&dots)[N]) {
    __m256i codes[8];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i bytes = _mm256_loadu_si256((const __m256i*)(weight + 64 * j));
      codes[2 * j] = unpack.low(bytes);
      codes[2 * j + 1] = unpack.high(bytes);
    }
    add_operands<Format, N>(codes, x, dots);
  }

  template <class Format, int N>
  static inline __attribute__((always_inline)) void add_operands(const Int (&operands)[8], const int8_t* x, Int (&dots)[N]) {
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) dots[t] = Dot::template dot<Format>(dots[t], operands, x + 32 * t);
  }
};
