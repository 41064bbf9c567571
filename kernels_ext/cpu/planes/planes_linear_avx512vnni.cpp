// Bit-planes times bfloat16 activations with AVX-512 (F, BW, DQ, VL): codes become digits of floats, then FMA.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own _mm512_undefined_epi32 (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif

namespace {

#include "../tile_rows.h"
#include "planes_linear_codes.h"
#include "planes_linear_nibbles.h"
#include "planes_linear_zmm.h"
#include "planes_linear_fields.h"

struct Isa : Zmm {
  // Eight planes of four tiles are so many streams through the same sets of the L1 cache that they push each other out.
  static constexpr int tiles_for(int tokens, int parts) { return tokens <= 2 && parts == 1 ? 4 : tokens <= 6 ? 2 : 1; }

  template <int N>
  struct Tokens {
    alignas(64) float x[N][32];
    void load(const uint16_t* block, int64_t row_stride) {
      for (int t = 0; t < N; ++t) {
        for (int half = 0; half < 32; half += 16) {
          const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(block + t * row_stride + half)));
          _mm512_store_si512(&x[t][half], _mm512_slli_epi32(words, 16));
        }
      }
    }
  };

  template <int kParts>
  using Unpack = UnpackFields<Zmm, kParts>;

  template <int kParts, int N>
  static inline __attribute__((always_inline)) void add_block(const Unpack<kParts>& unpack, const uint8_t* block,
                                                              const Tokens<N>& tokens, Float (&dots)[N]) {
    unpack.columns(block, [&](int k, Float column) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) dots[t] = fma(column, set(tokens.x[t][k]), dots[t]);
    });
  }
};

#include "planes_linear_tile.h"

}  // namespace

extern "C" void mlspec_bitplane_linear_avx512vnni(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  bitplane_linear(*args, out_begin, out_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
