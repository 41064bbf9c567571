// Exact product with a nested weight with AVX512-BF16: pairs of rebuilt weights of 16 outputs meet a pair of activations.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace {

#include "nested_rebuild_zmm.h"
#include "nested_total.h"
#include "nested_sums_zmm.h"

struct Isa : SumsZmm {
  struct Activations {
    uint32_t pair[16];
  };
  static void arrange(const uint16_t* x, Activations& to) { std::memcpy(to.pair, x, sizeof to.pair); }
  static __m512i load_pairs(const uint32_t* p) { return _mm512_load_si512(p); }
  static Sum fma(__m512i w, const Activations& x, int pair, Sum sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x.pair[pair])));
  }
};

#include "nested_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(nested_linear_exact_avx512bf16, linear)

MLSPEC_TARGET_END
