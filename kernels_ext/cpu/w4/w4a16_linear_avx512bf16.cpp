// 4-bit weights times bfloat16 activations with AVX512-BF16: vpermw turns a nibble into bfloat16, vdpbf16ps takes pairs.
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#endif

namespace {

#include "w4a16_linear_zmm.h"

struct Isa : Zmm {
  // A sum is a chain of dependent vdpbf16ps of 6 cycles and more: several tiles keep several chains in flight.
  static constexpr int tiles_for(int tokens) { return tokens <= 2 ? 4 : tokens <= 6 ? 2 : 1; }

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

extern "C" void mlspec_mxfp4_linear_bf16_avx512bf16(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear<Mxfp4>(*args, out_begin, out_end);
}

extern "C" void mlspec_nested_linear_bf16_avx512bf16(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear<Nested>(*args, out_begin, out_end);
}

extern "C" void mlspec_int4_linear_bf16_avx512bf16(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  int4_linear(*args, out_begin, out_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
