// Exact product with a nested weight with AVX-512 (F, BW, DQ, VL): rebuilt bfloat16 widened by a shift and a mask, float32 FMA.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "../kernels.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own _mm512_undefined_epi32 (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

namespace {

#include "nested_rebuild_zmm.h"
#include "nested_total.h"

struct Isa {
  using Sum = __m512;
  static constexpr int kVectors = 1, kSums = 16, kMaxTokens = 12;
  static constexpr int sums_for(int tokens) { return tokens == 1 ? 16 : tokens <= 3 ? 8 : tokens <= 6 ? 4 : 2; }

  struct Activations {
    float even[16], odd[16];
  };
  struct Weights {
    __m512 even, odd;
  };
  static Weights widen(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
  }
  static void arrange(const uint16_t* x, Activations& to) {
    const Weights wide = widen(_mm512_loadu_si512(x));
    _mm512_store_ps(to.even, wide.even);
    _mm512_store_ps(to.odd, wide.odd);
  }
  static void rebuild(const uint8_t* nibbles, const uint8_t* exponents, const uint8_t* low, uint32_t (*pairs)[16]) {
    Rebuild()(nibbles, exponents, low, pairs);
  }
  static Sum load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, Sum sum) { _mm512_store_ps(p, sum); }
  static Weights load_pairs(const uint32_t* p) { return widen(_mm512_load_si512(p)); }
  static Sum fma(const Weights& w, const Activations& x, int pair, Sum sum) {
    const Sum with_even = _mm512_fmadd_ps(w.even, _mm512_set1_ps(x.even[pair]), sum);
    return _mm512_fmadd_ps(w.odd, _mm512_set1_ps(x.odd[pair]), with_even);
  }
  static void store_total(const Sum* sums, float* to) { _mm512_store_ps(to, total_of_16(sums)); }
};

#include "nested_linear_tile.h"

}  // namespace

extern "C" void mlspec_nested_linear_exact_avx512vnni(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear(*args, out_begin, out_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
