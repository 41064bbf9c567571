// 4-bit weights times int8 activations with AVX-512 VNNI and VBMI.
// Every processor with AVX512-BF16 and VNNI but Cooper Lake has VBMI too (Zen 4, Sapphire Rapids).
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c")

namespace {

#define MLSPEC_INT8_VBMI
#include "int8_linear_zmm.h"
#include "int8_linear_tile.h"

}  // namespace

MLSPEC_INT8_LINEARS(avx512bf16)

MLSPEC_TARGET_END
