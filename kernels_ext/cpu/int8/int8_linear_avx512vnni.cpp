// 4-bit weights times int8 activations with AVX-512 VNNI: vpdpbusd takes 16 outputs times 4 elements.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")

namespace {

#include "int8_linear_zmm.h"
#include "int8_linear_tile.h"

}  // namespace

MLSPEC_INT8_LINEARS(avx512vnni)

MLSPEC_TARGET_END
