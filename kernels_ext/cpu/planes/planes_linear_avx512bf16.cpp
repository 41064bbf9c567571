// Bit-planes times bfloat16 activations with AVX512-BF16: vdpbf16ps takes pairs of bfloat16, looked up or cut from floats.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../kernels.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own _mm512_undefined_epi32 (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#endif

namespace {

#include "../tile_rows.h"
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
  struct Tokens {
    const uint16_t* x;
    int64_t stride;
    void load(const uint16_t* block, int64_t row_stride) { x = block, stride = row_stride; }
    __m512bh pair(int t, int k) const {
      int32_t two;
      std::memcpy(&two, x + t * stride + k, 4);
      return (__m512bh)_mm512_set1_epi32(two);
    }
  };

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

extern "C" void mlspec_bitplane_linear_avx512bf16(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  bitplane_linear(*args, out_begin, out_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
