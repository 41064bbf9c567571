// Dense linear with AVX2 and FMA: bfloat16 widened by a shift and a mask, float32 FMA.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma")

namespace {

inline __m256 add_neighbours(__m256 a, __m256 b) {  // each 128 bits: a01 a23 b01 b23
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD));
}

inline void add_lanes_of_four(const __m256* sum, float* total) {
  const __m256 halves = add_neighbours(add_neighbours(sum[0], sum[1]), add_neighbours(sum[2], sum[3]));
  _mm_storeu_ps(total, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

struct WidenedDot {
  using Element = uint16_t;
  static constexpr int kStep = 16, kMaxCols = 5;
  // Of 16 registers: 5 x 2 sums, 2 x 2 weights (even and odd elements) and 2 of x.
  static constexpr int rows_for(int cols) { return cols == 1 ? 4 : 2; }
  using Sum = __m256;
  struct Operand {
    __m256 even, odd;
  };
  static Sum zero() { return _mm256_setzero_ps(); }
  static Operand load(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))))};
  }
  static Operand load(const uint16_t* p, int64_t count) {
    uint16_t row[kStep] = {};
    std::memcpy(row, p, count * sizeof *p);
    return load(row);
  }
  static Sum fma(const Operand& w, const Operand& x, Sum sum) {
    return _mm256_fmadd_ps(w.odd, x.odd, _mm256_fmadd_ps(w.even, x.even, sum));
  }
  static void add_lanes(const Sum* sum, float* total) { add_lanes_of_four(sum, total); }
};

struct FloatDot {
  using Element = float;
  static constexpr int kStep = 8, kMaxCols = 5;
  static constexpr int rows_for(int cols) { return cols == 1 ? 8 : cols == 2 ? 4 : cols <= 4 ? 3 : 2; }
  using Sum = __m256;
  using Operand = __m256;
  static Sum zero() { return _mm256_setzero_ps(); }
  static Operand load(const float* p) { return _mm256_loadu_ps(p); }
  static Operand load(const float* p, int64_t count) {
    float row[kStep] = {};
    std::memcpy(row, p, count * sizeof *p);
    return load(row);
  }
  static Sum fma(Operand w, Operand x, Sum sum) { return _mm256_fmadd_ps(w, x, sum); }
  static void add_lanes(const Sum* sum, float* total) { add_lanes_of_four(sum, total); }
};

#include "dense_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(bf16_linear_avx2, linear<WidenedDot>)
MLSPEC_LINEAR(f32_linear_avx2, linear<FloatDot>)

MLSPEC_TARGET_END
