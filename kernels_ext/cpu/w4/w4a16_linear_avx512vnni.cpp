// 4-bit weights times bfloat16 activations with AVX-512 (F, BW, DQ, VL): vpermps turns a nibble into a float, then FMA.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")

namespace {

#include "../tokens.h"
#include "../tokens_zmm.h"
#include "w4a16_linear_zmm.h"

struct Isa : Zmm {
  static constexpr int tiles_for(int tokens) { return tokens <= 2 ? 4 : tokens <= 6 ? 2 : 1; }

  template <int N>
  using Tokens = FloatTokens<N, WidenZmm>;

  template <class Format>
  struct Unpack {
    __m512 first, second;  // values of indices 0..15 and 16..31
    explicit Unpack(const mlspec_linear_args& a) {
      alignas(64) float values[32];
      for (int i = 0; i < 32; ++i) values[i] = Format::value(a, i);
      first = _mm512_load_ps(values), second = _mm512_load_ps(values + 16);
    }
    __m512 look_up(__m512i index) const {
      if constexpr (Format::kHasZeros) return _mm512_permutex2var_ps(first, index, second);  // the low 5 bits
      return _mm512_permutexvar_ps(index, first);                                             // the low 4 bits
    }
  };

  template <class Format, int N>
  static inline __attribute__((always_inline)) void add_block(const Unpack<Format>& unpack, const uint8_t* weight,
                                                              Zeros zeros, const Tokens<N>& tokens, Float (&dots)[N]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i low, high;
      split<Format>(_mm512_loadu_si512(weight + 64 * j), zeros, low, high);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512 four = unpack.look_up(_mm512_srli_epi32(low, 8 * i));
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) dots[t] = fma(four, set(tokens.x[t][8 * j + i]), dots[t]);
        const __m512 next = unpack.look_up(_mm512_srli_epi32(high, 8 * i));
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) dots[t] = fma(next, set(tokens.x[t][8 * j + 4 + i]), dots[t]);
      }
    }
  }
};

#include "w4a16_linear_tile.h"

}  // namespace

MLSPEC_W4A16_LINEARS(avx512vnni)

MLSPEC_TARGET_END
