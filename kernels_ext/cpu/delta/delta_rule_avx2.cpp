// Gated delta nets with AVX2, FMA and F16C: a Vec is two registers.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma,f16c")

namespace {

#include "../rows/vec_ymm.h"
#include "../rows/row_ops_words.h"
#include "../rows/row_ops_math.h"
#include "../rows/row_ops_each.h"
#include "delta_rule_loops.h"

}  // namespace

extern "C" {
void mlspec_delta_rule_avx2(const mlspec_delta_args* args) { delta_rule(args); }
void mlspec_sigmoid_mul_avx2(const float* gate, int64_t n, float* y) { sigmoid_mul(gate, n, y); }
}

MLSPEC_TARGET_END
