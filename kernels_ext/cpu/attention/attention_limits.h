// How large may a head be? Whoever calls mlspec_row_ops::attention checks this; its buffers are on the stack (about 350 KiB).
#pragma once
#include <cstdint>

namespace mlspec {

inline constexpr int64_t kMaxHeadDim = 512;

}  // namespace mlspec
