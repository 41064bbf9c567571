// Dense linear with AVX-512 (F, BW, DQ, VL): bfloat16 widened by a shift and a mask, float32 FMA.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,fma")

namespace {

#include "dense_linear_lanes512.h"

struct WidenedDot {
  using Element = uint16_t;
  static constexpr int kStep = 32, kMaxCols = 9;
  // A weight row is two registers (even and odd elements): 9 x 2 sums, 2 x 2 weights and 2 of x; 5 x 4, 4 x 2 and 2.
  static constexpr int rows_for(int cols) { return cols == 1 ? 8 : cols <= 5 ? 4 : 2; }
  using Sum = __m512;
  struct Operand {
    __m512 even, odd;
  };
  static Sum zero() { return _mm512_setzero_ps(); }
  static Operand widen(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
  }
  static Operand load(const uint16_t* p) { return widen(_mm512_loadu_si512(p)); }
  static Operand load(const uint16_t* p, int64_t count) {
    return widen(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), p));
  }
  static Sum fma(const Operand& w, const Operand& x, Sum sum) {
    return _mm512_fmadd_ps(w.odd, x.odd, _mm512_fmadd_ps(w.even, x.even, sum));
  }
  static void add_lanes(const Sum* sum, float* total) { add_lanes_of_four(sum, total); }
};

struct FloatDot {
  using Element = float;
  static constexpr int kStep = 16, kMaxCols = 9;
  static constexpr int rows_for(int cols) { return cols == 1 ? 8 : cols <= 6 ? 4 : 3; }
  using Sum = __m512;
  using Operand = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Operand load(const float* p) { return _mm512_loadu_ps(p); }
  static Operand load(const float* p, int64_t count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
  }
  static Sum fma(Operand w, Operand x, Sum sum) { return _mm512_fmadd_ps(w, x, sum); }
  static void add_lanes(const Sum* sum, float* total) { add_lanes_of_four(sum, total); }
};

#include "dense_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(bf16_linear_avx512vnni, linear<WidenedDot>)
MLSPEC_LINEAR(f32_linear_avx512vnni, linear<FloatDot>)

MLSPEC_TARGET_END
