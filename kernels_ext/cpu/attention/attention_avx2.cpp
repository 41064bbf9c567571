// Attention with AVX2 and FMA.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"
#include "attention_limits.h"

MLSPEC_TARGET("avx2,fma,f16c")

namespace {
using mlspec::kMaxHeadDim;

#include "../rows/vec_ymm.h"
#include "../rows/row_ops_math.h"
#include "attention_cache.h"
#include "attention_blocks.h"

// to[c * to_stride + r] = word c of the row at rows + r * stride. Loads put rows r and r + 4 side by side, so that transposing
// 4 x 4 words inside of 128 bits is all that is left.
inline void transpose_words(const char* rows, int64_t stride, uint32_t* to, int64_t to_stride) {
  for (int c = 0; c < 4; ++c) {
    for (int half = 0; half < kLanes; half += 8) {
      const auto quarter = [&](int r) {
        return _mm_loadu_ps(reinterpret_cast<const float*>(rows + (half + r) * stride) + 4 * c);
      };
      __m256 in[4];
      for (int i = 0; i < 4; ++i) in[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(quarter(i)), quarter(i + 4), 1);
      const auto lower = [&](int i) { return _mm256_castps_pd(_mm256_unpacklo_ps(in[i], in[i + 1])); };
      const auto upper = [&](int i) { return _mm256_castps_pd(_mm256_unpackhi_ps(in[i], in[i + 1])); };
      const __m256d low[2] = {lower(0), lower(2)}, high[2] = {upper(0), upper(2)};
      auto* const out = reinterpret_cast<float*>(to + 4 * c * to_stride + half);
      _mm256_storeu_ps(out, _mm256_castpd_ps(_mm256_unpacklo_pd(low[0], low[1])));
      _mm256_storeu_ps(out + to_stride, _mm256_castpd_ps(_mm256_unpackhi_pd(low[0], low[1])));
      _mm256_storeu_ps(out + 2 * to_stride, _mm256_castpd_ps(_mm256_unpacklo_pd(high[0], high[1])));
      _mm256_storeu_ps(out + 3 * to_stride, _mm256_castpd_ps(_mm256_unpackhi_pd(high[0], high[1])));
    }
  }
}

#include "attention_floats.h"

}  // namespace

extern "C" void mlspec_attention_avx2(const mlspec_attention_args* args) { attend<FloatTerms>(*args); }

MLSPEC_TARGET_END
