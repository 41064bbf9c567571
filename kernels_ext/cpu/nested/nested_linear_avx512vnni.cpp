// Exact product with a nested weight with AVX-512 (F, BW, DQ, VL): rebuilt bfloat16 widened by a shift and a mask, float32 FMA.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,fma")

namespace {

#include "nested_rebuild_zmm.h"
#include "nested_total.h"
#include "nested_sums_zmm.h"

struct Isa : SumsZmm {
  struct Activations {
    float even[16], odd[16];
  };
  struct Weights {
    __m512 even, odd;
  };
  static Weights widen(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
  }
  static void arrange(const uint16_t* x, Activations& to) {
    const Weights wide = widen(_mm512_loadu_si512(x));
    _mm512_store_ps(to.even, wide.even);
    _mm512_store_ps(to.odd, wide.odd);
  }
  static Weights load_pairs(const uint32_t* p) { return widen(_mm512_load_si512(p)); }
  static Sum fma(const Weights& w, const Activations& x, int pair, Sum sum) {
    const Sum with_even = _mm512_fmadd_ps(w.even, _mm512_set1_ps(x.even[pair]), sum);
    return _mm512_fmadd_ps(w.odd, _mm512_set1_ps(x.odd[pair]), with_even);
  }
};

#include "nested_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(nested_linear_exact_avx512vnni, linear)

MLSPEC_TARGET_END
