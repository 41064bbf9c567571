// What do sparse high parts add? Of every 4 inputs the sums of some of them: that of a pattern is the sum of the pattern without its
// last input, and that input. A pattern's sums of all groups lie together: most terms add one input, and these four patterns, a
// quarter of the tables, stay in the cache.
#pragma once
#include <cstdint>
#include <cstring>

#include "../kernels.h"

namespace mlspec {

inline int64_t zipper_table_floats(int64_t in) { return in / MLSPEC_ZIPPER_GROUP * MLSPEC_ZIPPER_SUMS; }

// x: bfloat16 [in]; tables [16][in / 4][lanes], of which lane `lane` is written.
inline void zipper_tables(const uint16_t* x, int64_t in, int64_t lanes, int64_t lane, float* tables) {
  const int64_t groups = in / MLSPEC_ZIPPER_GROUP;
  for (int64_t group = 0; group < groups; ++group) {
    float sums[MLSPEC_ZIPPER_SUMS] = {0.0f};
    for (int place = 0; place < MLSPEC_ZIPPER_GROUP; ++place) {
      const uint32_t bits = static_cast<uint32_t>(x[group * MLSPEC_ZIPPER_GROUP + place]) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      for (int pattern = 0; pattern < 1 << place; ++pattern) sums[pattern | 1 << place] = sums[pattern] + value;
    }
    float* const to = tables + group * lanes + lane;
    for (int pattern = 0; pattern < MLSPEC_ZIPPER_SUMS; ++pattern) to[pattern * groups * lanes] = sums[pattern];
  }
}

// A lane of no row, whose sums nobody reads: zeros, so that no NaN slows the others down.
inline void zipper_no_tables(int64_t in, int64_t lanes, int64_t lane, float* tables) {
  for (int64_t place = 0; place < zipper_table_floats(in); ++place) tables[place * lanes + lane] = 0.0f;
}

// How many rows of x the next pass takes of so many that are left, and in how many lanes.
struct ZipperPass {
  int64_t rows, lanes;
  explicit ZipperPass(int64_t left)
      : rows(left < MLSPEC_ZIPPER_LANES ? left : MLSPEC_ZIPPER_LANES), lanes(left == 1 ? 1 : MLSPEC_ZIPPER_LANES) {}
};

}  // namespace mlspec
