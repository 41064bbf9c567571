// Attention with AVX512-BF16: over a bfloat16 cache vdpbf16ps multiplies pairs of elements, and of slots.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"
#include "attention_limits.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")

namespace {
using mlspec::kMaxHeadDim;

#include "../rows/vec_zmm.h"
#include "../rows/row_ops_math.h"
#include "attention_cache.h"
#include "attention_blocks.h"
#include "transpose_zmm.h"
#include "attention_floats.h"
#include "attention_pairs_zmm.h"
#include "attention_few_zmm.h"

struct PairTerms : PairLayout {
  static constexpr int kFewQueries = kFewRows;
  using Operand = __m512bh;
  static __m512bh load(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh all(const uint16_t* p) {
    int32_t two;
    std::memcpy(&two, p, 4);
    return (__m512bh)_mm512_set1_epi32(two);
  }
  static Vec add(Vec sum, __m512bh a, __m512bh b) { return {_mm512_dpbf16_ps(sum.v, a, b)}; }
  static void multiply(const Factors<uint16_t>& f, int rows) { multiply_tiles<PairTerms>(f, rows); }
};

}  // namespace

extern "C" void mlspec_attention_avx512bf16(const mlspec_attention_args* args) {
  args->kv_dtype == MLSPEC_FLOAT32 ? attend<FloatTerms>(*args) : attend<PairTerms>(*args);
}

MLSPEC_TARGET_END
