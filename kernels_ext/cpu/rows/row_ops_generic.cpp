// Row operations without intrinsics: any processor, and the plainest statement of the order of the sums.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../kernels.h"

namespace {

#include "vec_generic.h"
#include "row_ops_math.h"
#include "row_ops_loops.h"
#include "row_ops_noise.h"

}  // namespace

extern "C" {
extern const mlspec_row_ops mlspec_row_ops_generic;
const mlspec_row_ops mlspec_row_ops_generic = {
    rms_norm, layer_norm, add, widen, narrow, activate, activate_mul, gate_pairs, rope, rope_pairs, softcap, argmax, draw};
}
