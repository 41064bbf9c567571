// Gated delta nets without intrinsics: any processor.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../kernels.h"


namespace {

#include "../rows/vec_generic.h"
#include "../rows/row_ops_math.h"
#include "../rows/row_ops_each.h"
#include "delta_rule_loops.h"

}  // namespace

extern "C" {
void mlspec_delta_rule_generic(const mlspec_delta_args* args) { delta_rule(args); }
void mlspec_sigmoid_mul_generic(const float* gate, int64_t n, float* y) { sigmoid_mul(gate, n, y); }
}
