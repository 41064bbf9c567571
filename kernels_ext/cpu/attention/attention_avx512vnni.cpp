// Attention with AVX-512 (F, BW, DQ, VL): floats, whatever the cache holds.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"
#include "attention_limits.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,fma")

namespace {
using mlspec::kMaxHeadDim;

#include "../rows/vec_zmm.h"
#include "../rows/row_ops_math.h"
#include "attention_cache.h"
#include "attention_blocks.h"
#include "transpose_zmm.h"
#include "attention_floats.h"

}  // namespace

extern "C" void mlspec_attention_avx512vnni(const mlspec_attention_args* args) { attend<FloatTerms>(*args); }

MLSPEC_TARGET_END
