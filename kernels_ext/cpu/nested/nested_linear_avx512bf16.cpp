// Exact product with a nested weight with AVX512-BF16: pairs of rebuilt weights of 16 outputs meet a pair of activations.
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

namespace {

#include "nested_rebuild_zmm.h"
#include "nested_total.h"

struct Isa {
  using Sum = __m512;
  static constexpr int kVectors = 1, kSums = 16, kMaxTokens = 12;
  // vdpbf16ps starts once a cycle and takes 6 or more: 12 to 24 sums in flight, of 32 registers.
  static constexpr int sums_for(int tokens) { return tokens == 1 ? 16 : tokens <= 3 ? 8 : tokens <= 6 ? 4 : 2; }

  struct Activations {
    uint32_t pair[16];
  };
  static void arrange(const uint16_t* x, Activations& to) { std::memcpy(to.pair, x, sizeof to.pair); }
  static void rebuild(const uint8_t* nibbles, const uint8_t* exponents, const uint8_t* low, uint32_t (*pairs)[16]) {
    Rebuild()(nibbles, exponents, low, pairs);
  }
  static Sum load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, Sum sum) { _mm512_store_ps(p, sum); }
  static __m512i load_pairs(const uint32_t* p) { return _mm512_load_si512(p); }
  static Sum fma(__m512i w, const Activations& x, int pair, Sum sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x.pair[pair])));
  }
  static void store_total(const Sum* sums, float* to) { _mm512_store_ps(to, total_of_16(sums)); }
};

#include "nested_linear_tile.h"

}  // namespace

extern "C" void mlspec_nested_linear_exact_avx512bf16(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear(*args, out_begin, out_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
