// Packing of activations with AVX-512 (F, BW, DQ, VL); every processor with its VNNI has them.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl")

namespace {

#include "pack_rows_vec512.h"

struct Vec : Vec512 {
  static constexpr bool kTransposes = false;
};

#include "pack_rows_order.h"

}  // namespace

MLSPEC_PACK_ROWS(avx512vnni)

MLSPEC_TARGET_END
