// How much does one call of attention take? Whoever calls CpuKernels::attention checks the one and cuts its tokens to the other.
#pragma once
#include <cstdint>

namespace mlspec {

inline constexpr int64_t kMaxHeadDim = 512;      // the buffers of a call are on its stack, up to 450 KiB
inline constexpr int64_t kAttentionTokens = 32;  // of one row in one call: they share each read of keys and values

}  // namespace mlspec
