// Gated delta nets with AVX-512 (F, BW, DQ, VL): a Vec is one register.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,fma")

namespace {

#include "../rows/vec_zmm.h"
#include "../rows/row_ops_words.h"
#include "../rows/row_ops_math.h"
#include "../rows/row_ops_each.h"
#include "delta_rule_loops.h"

}  // namespace

extern "C" {
void mlspec_delta_rule_avx512vnni(const mlspec_delta_args* args) { delta_rule(args); }
void mlspec_sigmoid_mul_avx512vnni(const float* gate, int64_t n, float* y) { sigmoid_mul(gate, n, y); }
}

MLSPEC_TARGET_END
