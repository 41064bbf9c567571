// 4-bit weights times bfloat16 activations with AVX-512 (F, BW, DQ, VL): vpermps turns a nibble into a float, then FMA.
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

#include "w4a16_linear_zmm.h"

struct Isa : Zmm {
  static constexpr int tiles_for(int tokens) { return tokens <= 2 ? 4 : tokens <= 6 ? 2 : 1; }

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

extern "C" void mlspec_mxfp4_linear_bf16_avx512vnni(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear<Mxfp4>(*args, out_begin, out_end);
}

extern "C" void mlspec_nested_linear_bf16_avx512vnni(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear<Nested>(*args, out_begin, out_end);
}

extern "C" void mlspec_int4_linear_bf16_avx512vnni(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  int4_linear(*args, out_begin, out_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
