// 4-bit weights times int8 activations with AVX-VNNI: the VEX form of vpdpbusd, for processors without AVX-512.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma,f16c,avxvnni")

namespace {

#include "int8_linear_chains.h"

struct Dot : TwoChains<Dot> {
  static constexpr bool kSigned = false;
  static __m256i add(__m256i sum, __m256i codes, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, codes, x); }
};

#include "int8_linear_ymm.h"
#include "int8_linear_tile.h"

}  // namespace

MLSPEC_INT8_LINEARS(avxvnni)

MLSPEC_TARGET_END
