// 4-bit weights times int8 activations with AVX-VNNI: the VEX form of vpdpbusd, for processors without AVX-512.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

namespace {

struct Dot {
  static constexpr bool kSigned = false;
  static __m256i x_dword(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }
  // Two chains of four: the latency of eight in a row would show at one token.
  template <class Format>
  static __m256i dot(__m256i dots, const __m256i (&codes)[8], const int8_t* x) {
    __m256i odd = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int k = 0; k < 8; k += 2) {
      dots = _mm256_dpbusd_avx_epi32(dots, codes[k], x_dword(x + 4 * k));
      odd = _mm256_dpbusd_avx_epi32(odd, codes[k + 1], x_dword(x + 4 * k + 4));
    }
    return _mm256_add_epi32(dots, odd);
  }
};

#include "int8_linear_ymm.h"
#include "int8_linear_tile.h"

}  // namespace

extern "C" void mlspec_mxfp4_linear_int8_avxvnni(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Mxfp4>(*args, begin, end);
}

extern "C" void mlspec_nested_linear_int8_avxvnni(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Nested>(*args, begin, end);
}

extern "C" void mlspec_int4_linear_int8_avxvnni(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Int4>(*args, begin, end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
