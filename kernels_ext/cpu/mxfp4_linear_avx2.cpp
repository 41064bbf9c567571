// MXFP4 linear with AVX2 and FMA: magnitudes by vpermps over eight entries, the code's bit 3 moved to the sign.
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "../formats.h"
#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace {
using namespace mlspec;

struct Vec {
  __m256 low, high;  // lanes 0..7 and 8..15
  static constexpr int kMaxCols = 4;
  static constexpr int rows_for(int cols) { return cols == 1 ? 4 : cols == 2 ? 2 : 1; }  // 8 sums of 16 registers
  static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static float sum(Vec a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  struct Decoder {
    __m256 scaled;  // the eight magnitudes; vpermps reads the low 3 bits of an index only
    explicit Decoder(const float* scale) : scaled(_mm256_mul_ps(_mm256_loadu_ps(kE2M1), _mm256_set1_ps(*scale))) {}
    __m256 value(__m256i code) const {
      const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
      return _mm256_xor_ps(_mm256_permutevar8x32_ps(scaled, code), _mm256_castsi256_ps(sign));
    }
    void decode(const uint8_t* bytes, Vec& even, Vec& odd) const {
      const __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
      const __m256i high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8)));
      even = {value(low), value(high)};
      odd = {value(_mm256_srli_epi32(low, 4)), value(_mm256_srli_epi32(high, 4))};
    }
  };
};

#include "mxfp4_linear_tile.h"

}  // namespace

extern "C" void mlspec_split_x_avx2(const void* x, mlspec_dtype dtype, int64_t in_features, int64_t row_begin,
                                    int64_t row_end, float* out) {
  split_x(x, dtype, in_features, row_begin, row_end, out);
}

extern "C" void mlspec_mxfp4_linear_avx2(const mlspec_mxfp4_linear_args* args, int64_t begin, int64_t end) {
  linear(*args, begin, end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
