// Bit-planes times bfloat16 activations with AVX-512 (F, BW, DQ, VL): codes become digits of floats, then FMA.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")

namespace {

#include "../tile_rows.h"
#include "../tokens.h"
#include "../tokens_zmm.h"
#include "planes_linear_codes.h"
#include "planes_linear_nibbles.h"
#include "planes_linear_zmm.h"
#include "planes_linear_fields.h"

struct Isa : Zmm, ByColumns<Isa, Zmm, WidenZmm> {
  // Eight planes of four tiles are so many streams through the same sets of the L1 cache that they push each other out.
  static constexpr int tiles_for(int tokens, int parts) { return tokens <= 2 && parts == 1 ? 4 : tokens <= 6 ? 2 : 1; }
};

#include "planes_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(bitplane_linear_avx512vnni, bitplane_linear)

MLSPEC_TARGET_END
