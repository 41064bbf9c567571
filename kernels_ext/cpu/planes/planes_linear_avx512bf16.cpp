// Bit-planes times bfloat16 activations with AVX512-BF16: vdpbf16ps takes pairs of bfloat16, looked up or cut from floats.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")

namespace {

#include "../tile_rows.h"
#include "../tokens.h"
#include "../tokens_zmm.h"
#include "planes_linear_codes.h"
#include "planes_linear_nibbles.h"
#include "planes_linear_zmm.h"
#include "planes_linear_fields.h"
#include "planes_linear_pairs.h"

struct FirstPart : UnpackPairs {
  explicit FirstPart(const mlspec_linear_args& a) : UnpackPairs(a, 0) {}
};

struct Isa : Zmm {
  // A sum is a chain of dependent vdpbf16ps of 6 cycles and more: several tiles keep several chains in flight. But eight
  // planes of four tiles are so many streams through the same sets of the L1 cache that they push each other out.
  static constexpr int tiles_for(int tokens, int parts) {
    if (parts == 2) return tokens <= 2 ? 2 : 1;
    return tokens <= 2 ? 4 : tokens <= 6 ? 2 : 1;
  }

  template <int N>
  using Tokens = PairTokens<N>;

  // One to four planes are looked up. More are bytes, which become floats: two look-ups would be twice the products.
  template <int kParts>
  using Unpack = std::conditional_t<kParts == 1, FirstPart, UnpackFields<Zmm, 2>>;

  template <int kParts, int N>
  static inline __attribute__((always_inline)) void add_block(const Unpack<kParts>& unpack, const uint8_t* block,
                                                              const Tokens<N>& tokens, Float (&dots)[N]) {
    const auto add_pair = [&](int p, __m512i pair) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) dots[t] = _mm512_dpbf16_ps(dots[t], (__m512bh)pair, tokens.pair(t, 2 * p));
    };
    if constexpr (kParts == 1) {
      unpack.pairs(block, add_pair);
    } else {
      unpack.quads(block, [&](int p, Float even, Float next_even, Float odd, Float next_odd) __attribute__((always_inline)) {
        add_pair(p, join(even, odd));
        add_pair(p + 8, join(next_even, next_odd));
      });
    }
  }

  static __m512i join(Float even, Float odd) {  // both are bfloat16, with zeros below
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
  }
};

#include "planes_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(bitplane_linear_avx512bf16, bitplane_linear)

MLSPEC_TARGET_END
