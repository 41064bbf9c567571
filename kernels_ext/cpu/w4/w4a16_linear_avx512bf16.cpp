// 4-bit weights times bfloat16 activations with AVX512-BF16: vpermw turns a nibble into bfloat16, vdpbf16ps takes pairs.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")

namespace {

#include "../tokens.h"
#include "../tokens_zmm.h"
#include "w4a16_linear_zmm.h"

struct Isa : Zmm {
  // A sum is a chain of dependent vdpbf16ps of 6 cycles and more: several tiles keep several chains in flight.
  static constexpr int tiles_for(int tokens) { return tokens <= 2 ? 4 : tokens <= 6 ? 2 : 1; }

  template <int N>
  using Tokens = PairTokens<N>;

  template <class Format>
  using Unpack = UnpackPairs<Format>;

  template <class Format, int N>
  static inline __attribute__((always_inline)) void add_block(const Unpack<Format>& unpack, const uint8_t* weight,
                                                              Zeros zeros, const Tokens<N>& tokens, Float (&dots)[N]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i pairs[4];
      unpack.row(weight + 64 * j, zeros, pairs);
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) {
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) {
          dots[t] = _mm512_dpbf16_ps(dots[t], (__m512bh)pairs[p], tokens.pair(t, 8 * j + 2 * p));
        }
      }
    }
  }
};

#include "w4a16_linear_tile.h"

}  // namespace

MLSPEC_W4A16_LINEARS(avx512bf16)

MLSPEC_TARGET_END
