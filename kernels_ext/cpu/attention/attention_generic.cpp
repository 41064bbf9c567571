// Attention without intrinsics: any processor, and the plainest statement of the order of the sums.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "attention_limits.h"

namespace {
using mlspec::kMaxHeadDim;

#include "../rows/vec_generic.h"
#include "../rows/row_ops_math.h"
#include "attention_cache.h"
#include "attention_blocks.h"

// to[c * to_stride + r] = word c of the row at rows + r * stride.
inline void transpose_words(const char* rows, int64_t stride, uint32_t* to, int64_t to_stride) {
  for (int r = 0; r < kLanes; ++r) {
    uint32_t row[kLanes];
    std::memcpy(row, rows + r * stride, sizeof row);
    for (int c = 0; c < kLanes; ++c) to[c * to_stride + r] = row[c];
  }
}

#include "attention_floats.h"

}  // namespace

extern "C" void mlspec_attention_generic(const mlspec_attention_args* args) { attend<FloatTerms>(*args); }
