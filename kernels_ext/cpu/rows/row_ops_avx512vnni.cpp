// Row operations with AVX-512 (F, BW, DQ, VL): a Vec is one register.
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

#include "vec_zmm.h"
#include "row_ops_math.h"
#include "row_ops_loops.h"
#include "row_ops_noise.h"

}  // namespace

extern "C" {
extern const mlspec_row_ops mlspec_row_ops_avx512vnni;
const mlspec_row_ops mlspec_row_ops_avx512vnni = {
    rms_norm, layer_norm, add, widen, narrow, activate, activate_mul, gate_pairs, rope, rope_pairs, softcap, argmax, draw};
}

MLSPEC_TARGET_END
