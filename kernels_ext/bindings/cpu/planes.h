// Which zero may a weight of bit-planes have? One with which bfloat16 holds the levels of every prefix (formats/planes/codes.py).
#pragma once
#include <c10/util/Exception.h>

#include <string>

#include "../../formats.h"

namespace mlspec {

// The most planes that integers meet: two products of such a code and an int8 fit the int16 of vpmaddubsw.
inline constexpr int64_t kIntegerPlanes = 7;

// Kernels multiply what planes mean as bfloat16: of eight planes only a zero in the middle leaves no level too long for it.
inline void check_zero_doubled(const std::string& what, int64_t zero_doubled, int64_t stored_planes) {
  const int64_t highest = 2 * ((int64_t{1} << stored_planes) - 1);
  const int64_t least = stored_planes == kMaxPlanes ? 254 : 0, most = stored_planes == kMaxPlanes ? 256 : highest;
  TORCH_CHECK_VALUE(zero_doubled >= least && zero_doubled <= most, what, ": zero_doubled is ", zero_doubled,
                    ", twice a code of ", stored_planes, " planes is 0 to ", highest, ", and bfloat16 holds every level from ",
                    least, " to ", most);
}

}  // namespace mlspec
