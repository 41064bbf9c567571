// Row operations with AVX2, FMA and F16C: a Vec is two registers.
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

#include "vec_ymm.h"
#include "row_ops_math.h"
#include "row_ops_loops.h"
#include "row_ops_noise.h"

}  // namespace

extern "C" {
extern const mlspec_row_ops mlspec_row_ops_avx2;
const mlspec_row_ops mlspec_row_ops_avx2 = {
    rms_norm, layer_norm, add, widen, narrow, activate, activate_mul, gate_pairs, rope, rope_pairs, softcap, argmax, draw};
}

MLSPEC_TARGET_END
