// How large are the pieces of a 4-bit or nested weight? The numbers of hf_mlspec/ops/tiles.py; the layout is drawn in cpu/kernels.h.
#pragma once
#include <cstdint>

namespace mlspec {

inline constexpr int64_t kBlock = 32;        // elements along `in` of a tile's step, and of one E8M0 scale
inline constexpr int64_t kTileOutputs = 16;  // outputs of a tile: the lanes of a 512-bit register
inline constexpr int64_t kTileBytes = kTileOutputs * kBlock / 2;
inline constexpr int64_t kLowTileBytes = kTileOutputs * kBlock * 12 / 8;  // a nested weight's other bits
inline constexpr int64_t kCodebookLevels = 8;
static_assert(kTileBytes == 4 * 16 * 4, "[4][16][4] bytes, two codes each");

}  // namespace mlspec
