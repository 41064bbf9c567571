// 4-bit weights times int8 activations with AVX2: vpmaddubsw into int16, vpmaddwd into int32.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma,f16c")

namespace {

#include "int8_linear_chains.h"

struct Dot {
  static constexpr bool kSigned = false;
  // vpmaddubsw adds two products to an int16, and as many of those fit as 32767 / (2 * largest code * 127): 8, 5 or 1.
  template <class Format>
  static __m256i dot(__m256i dots, const __m256i (&codes)[8], const int8_t* x) {
    constexpr int kFit = 32767 / (2 * Format::kLargestCode * 127), kSafe = kFit >= 8 ? 8 : kFit >= 4 ? 4 : 1;
#pragma GCC unroll 8
    for (int k = 0; k < 8; k += kSafe) {
      __m256i sum = _mm256_maddubs_epi16(codes[k], x_dword(x + 4 * k));
#pragma GCC unroll 8
      for (int i = k + 1; i < k + kSafe; ++i) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[i], x_dword(x + 4 * i)));
      }
      dots = _mm256_add_epi32(dots, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
    }
    return dots;
  }
};

#include "int8_linear_ymm.h"
#include "int8_linear_tile.h"

}  // namespace

MLSPEC_INT8_LINEARS(avx2)

MLSPEC_TARGET_END
