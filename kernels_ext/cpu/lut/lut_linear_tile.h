// How does a weight of lookup-table planes meet bfloat16 activations? What its kernels share.
//
// Included inside the anonymous namespaces of lut_linear_<isa>.cpp. A tile is 16 outputs, a step of it up to four blocks of
// inputs (the last may have fewer): 4 bytes a block, of each output's blocks one behind the other, [16 outputs][blocks][4].
// Bit q of byte j of a block is element 8 (q % 4) + 4 (q / 4) + 2 (j % 2) + j / 2 (hf_mlspec/ops/lut/tiles.py). Values are
// float16 and are rounded to bfloat16; products are exact, sums float32 in an order set by in_features.

#include "../tile_rows.h"

using mlspec::kBlock, mlspec::kMaxPlanes, mlspec::cpu_tiles::kPlaneBytes;

constexpr int kStepBlocks = 4, kStep = kStepBlocks * 32, kStepBytes = kStepBlocks * 64;  // of one plane: 64 = kPlaneBytes
constexpr int kRowBytes = kStep / 8;
static_assert(kStepBytes == kStepBlocks * kPlaneBytes && kRowBytes * kTileOutputs == kStepBytes);

// float16 [2^num_planes] of one output of a tile. The tables of a row end with that of all planes.
inline const uint16_t* table_of(const mlspec_linear_args& a, int64_t tile, int64_t row) {
  const int64_t start = a.table_columns - (int64_t{2} << a.stored_planes) + (int64_t{1} << a.num_planes);
  return static_cast<const uint16_t*>(a.scale) + (tile * kTileOutputs + row) * a.table_columns + start;
}

// A step with fewer blocks as a whole one, zeros behind them: to [num_planes][kStepBytes].
inline void widen_step(const mlspec_linear_args& a, const uint8_t* step, int64_t blocks, uint8_t* to) {
  std::memset(to, 0, a.num_planes * kStepBytes);
  for (int64_t plane = 0; plane < a.num_planes; ++plane) {
    for (int64_t row = 0; row < kTileOutputs; ++row)
      std::memcpy(to + plane * kStepBytes + row * kRowBytes, step + plane * a.plane_bytes + row * 4 * blocks, 4 * blocks);
  }
}

// The steps of a tile; the last may have fewer blocks.
struct Steps {
  int64_t blocks, whole, count;
  explicit Steps(const mlspec_linear_args& a)
      : blocks(a.in_features / kBlock), whole(blocks / kStepBlocks), count((blocks + kStepBlocks - 1) / kStepBlocks) {}
  // Its planes and the bytes from one to the next. last: room for a step that is widened, kMaxPlanes * kStepBytes.
  const uint8_t* at(const mlspec_linear_args& a, int64_t tile, int64_t step, uint8_t* last, int64_t* plane_bytes) const {
    const uint8_t* const from = static_cast<const uint8_t*>(a.weight) + tile * blocks * kPlaneBytes + step * kStepBytes;
    *plane_bytes = a.plane_bytes;
    if (step < whole) return from;
    widen_step(a, from, blocks - whole * kStepBlocks, last);
    *plane_bytes = kStepBytes;
    return last;
  }
};
