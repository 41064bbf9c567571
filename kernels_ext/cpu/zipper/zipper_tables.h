// What do sparse high parts add? Of every 4 inputs the sums of some of them: that of a pattern is the sum of the pattern without its
// last input, and that input. A pattern's sums of all groups lie together: most terms add one input, and these four patterns, a
// quarter of the tables, stay in the cache.
#pragma once
#include <cstdint>
#include <cstring>

#include "../kernels.h"

namespace mlspec {

constexpr int64_t kGroupsAtOnce = 256;  // whose tables one thread makes at a time

inline int64_t zipper_table_floats(int64_t in) { return in / MLSPEC_ZIPPER_GROUP * MLSPEC_ZIPPER_SUMS; }

// x: bfloat16 [in]; tables [16][in / 4][lanes], of whose patterns of one input lane `lane` is written.
inline void zipper_inputs(const uint16_t* x, int64_t in, int64_t lanes, int64_t lane, float* tables) {
  const int64_t groups = in / MLSPEC_ZIPPER_GROUP;
  for (int place = 0; place < MLSPEC_ZIPPER_GROUP; ++place) {
    float* const to = tables + (int64_t(1) << place) * groups * lanes + lane;
    for (int64_t group = 0; group < groups; ++group) {
      const uint32_t bits = static_cast<uint32_t>(x[group * MLSPEC_ZIPPER_GROUP + place]) << 16;
      std::memcpy(to + group * lanes, &bits, sizeof bits);
    }
  }
}

// A lane of no row, whose sums nobody reads: zeros, so that no NaN slows the others down.
inline void zipper_no_inputs(int64_t in, int64_t lanes, int64_t lane, float* tables) {
  const int64_t groups = in / MLSPEC_ZIPPER_GROUP;
  for (int place = 0; place < MLSPEC_ZIPPER_GROUP; ++place)
    for (int64_t group = 0; group < groups; ++group) tables[((int64_t(1) << place) * groups + group) * lanes + lane] = 0.0f;
}

// The other patterns of groups [begin, end), in all lanes, once those of one input are there.
inline void zipper_tables(int64_t in, int64_t lanes, int64_t begin, int64_t end, float* tables) {
  const int64_t size = in / MLSPEC_ZIPPER_GROUP * lanes;
  for (int64_t i = begin * lanes; i < end * lanes; ++i) tables[i] = 0.0f;
  for (int place = 1; place < MLSPEC_ZIPPER_GROUP; ++place) {
    const float* const last = tables + (int64_t(1) << place) * size;
    for (int pattern = 1; pattern < 1 << place; ++pattern) {
      const float* const rest = tables + pattern * size;
      float* const to = tables + (pattern | 1 << place) * size;
      for (int64_t i = begin * lanes; i < end * lanes; ++i) to[i] = rest[i] + last[i];
    }
  }
}

// How many rows of x the next pass takes of so many that are left, and in how many lanes.
struct ZipperPass {
  int64_t rows, lanes;
  explicit ZipperPass(int64_t left)
      : rows(left < MLSPEC_ZIPPER_LANES ? left : MLSPEC_ZIPPER_LANES), lanes(left == 1 ? 1 : MLSPEC_ZIPPER_LANES) {}
};

}  // namespace mlspec
