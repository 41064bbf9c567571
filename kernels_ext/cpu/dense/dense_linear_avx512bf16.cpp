// BF16 linear with AVX512-BF16: vdpbf16ps multiplies 32 weights as they lie in the row.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace {

#include "dense_linear_lanes512.h"

struct PairDot {
  using Element = uint16_t;
  static constexpr int kStep = 32, kMaxCols = 9;
  // vdpbf16ps starts once a cycle and takes 6 or more: at least 8 sums in flight. With 8 columns and more a weight row
  // alone keeps it busy; a second and third save reads of x. 27 sums, 3 weights and one x are 31 of 32 registers.
  static constexpr int rows_for(int cols) { return cols <= 2 ? 8 : cols <= 6 ? 4 : 3; }
  using Sum = __m512;
  using Operand = __m512i;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Operand load(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static Operand load(const uint16_t* p, int64_t count) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), p);
  }
  static Sum fma(Operand w, Operand x, Sum sum) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
  static void add_lanes(const Sum* sum, float* total) { add_lanes_of_four(sum, total); }
};

#include "dense_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(bf16_linear_avx512bf16, linear<PairDot>)

MLSPEC_TARGET_END
