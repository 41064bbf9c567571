// Of which widths does a weight of lookup-table planes have tables? What the shape of its tables tells.
#pragma once
#include <cstdint>

namespace mlspec {

// S of tables of S, S + 1 ... stored bits, 2^(stored + 1) - 2^S values in all; 0 where no S has so many columns.
inline int64_t least_planes_of(int64_t stored, int64_t columns) {
  for (int64_t least = 1; least <= stored; ++least)
    if ((int64_t{2} << stored) - (int64_t{1} << least) == columns) return least;
  return 0;
}

}  // namespace mlspec
