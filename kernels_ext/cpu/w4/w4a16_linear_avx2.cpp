// 4-bit weights times bfloat16 activations with AVX2 and FMA: nibbles become integers in bytes, bytes become floats.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma,f16c")

namespace {

#include "../tokens.h"
#include "../tokens_ymm.h"

struct Isa {
  using Float = __m256;
  using Zeros = __m256i;  // each output's zero point in its four bytes
  static constexpr int kVectors = 2, kMaxTokens = 9;
  static constexpr float kValueFactor = 2.0f;  // E2M1 doubled is an integer
  static constexpr int tiles_for(int tokens) { return tokens == 1 ? 2 : 1; }

  static Float zeros() { return _mm256_setzero_ps(); }
  static Float set(float scalar) { return _mm256_set1_ps(scalar); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256i load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
  static Float power(const uint8_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_bytes(p), 23)); }
  static Float load_float16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static Zeros load_zeros(const uint8_t* p) { return _mm256_mullo_epi32(load_bytes(p), _mm256_set1_epi32(0x01010101)); }
  static void prefetch(const uint8_t* block) {
    for (int line = 0; line < 4; ++line) _mm_prefetch((const char*)block + 64 * line, _MM_HINT_T0);
  }

  template <int N>
  using Tokens = FloatTokens<N, WidenYmm>;

  template <class Format>
  struct Unpack {
    __m256i mask = _mm256_set1_epi8(15), table;
    explicit Unpack(const mlspec_linear_args& a) {
      alignas(16) int8_t values[16];
      for (int i = 0; i < 16; ++i) values[i] = static_cast<int8_t>(Format::value(a, i));
      table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)values));
    }
    __m256i look_up(__m256i bytes, Zeros zeros) const {  // int8 values of the low nibbles
      const __m256i codes = _mm256_and_si256(bytes, mask);
      if constexpr (Format::kHasZeros) return _mm256_sub_epi8(codes, zeros);
      return _mm256_shuffle_epi8(table, codes);
    }
  };

  // The byte at `shift` bits of each lane, as a float.
  static Float widen(__m256i bytes, int shift) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 24 - shift), 24));
  }

  template <class Format, int N>
  static inline __attribute__((always_inline)) void add_block(const Unpack<Format>& unpack, const uint8_t* weight,
                                                              Zeros zeros, const Tokens<N>& tokens, Float (&dots)[N]) {
    for (int j = 0; j < 4; ++j) {
      const __m256i bytes = _mm256_loadu_si256((const __m256i*)(weight + 64 * j));
      const __m256i low = unpack.look_up(bytes, zeros), high = unpack.look_up(_mm256_srli_epi16(bytes, 4), zeros);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Float four = widen(low, 8 * i);
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) dots[t] = fma(four, set(tokens.x[t][8 * j + i]), dots[t]);
        const Float next = widen(high, 8 * i);
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) dots[t] = fma(next, set(tokens.x[t][8 * j + 4 + i]), dots[t]);
      }
    }
  }
};

#include "w4a16_linear_tile.h"

}  // namespace

MLSPEC_W4A16_LINEARS(avx2)

MLSPEC_TARGET_END
