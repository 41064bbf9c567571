// How do the exact values of nested weights come from their tiles in the order of sums of portable_bf16? Its chunks are 64 inputs, dealt
// alternately to two groups of warps: here the halves of a tile.
#pragma once

#include "../nested/nested_linear_format.cuh"
#include "portable_ring.cuh"

namespace mlspec::portable {

struct NestedHalfTiles {
  static constexpr bool kPacked = true, kHasZeros = false, kHasShift = false, kPrefix = false, kTables = false;
  static constexpr int kChunk = kTileInputs / 2, kGroups = 0, kActivationBits = 16;
  static constexpr float kOutScale = 1;
  static constexpr int kParts = 4;  // nibbles, low bytes of two steps, of two more, high nibbles
  static constexpr int kPartBytes = kCodeBytes / 2, kScaleBytes = kTileOutputs * kBlocks / 2;
  static constexpr int kTileBytes = kPartBytes + kScaleBytes, kMoreBytes = (kParts - 1) * kPartBytes, kTableBytes = 0;

  uint4 words[kParts];
  uint32_t blocks, beyond;

  __device__ __forceinline__ static LanePlace place(int warp, int lane) {
    return {uint32_t(warp * 32 + lane) * 16, uint32_t(warp * 8 + lane / 4) * 4};
  }
  __device__ __forceinline__ void prepare(const Params& p) { beyond = draft_exponents_beyond(p); }

  // Of each part of a tile [w 4][half 2][512 bytes] and of its scales [w, r 32][half 2][4 bytes]: what `codes` and `scales` name.
  __device__ __forceinline__ static void copy_part(uint32_t to, const uint8_t* tiles, const uint8_t* more, TilePlace codes,
                                                   TilePlace scales, int half, int thread) {
    const int place = codes.thread / 32 * 1024 + half * 512 + codes.thread % 32 * 16;
    copy_async(to + thread * 16, tiles + codes.tile * kScaledTileBytes + place, true);
    const uint8_t* scale = tiles + scales.tile * kScaledTileBytes + kCodeBytes;
    if (thread < 32) copy_4(to + kPartBytes + thread * 4, scale + scales.thread * 8 + half * 4);
    const uint8_t* fields = more + codes.tile * kFieldBytes;
#pragma unroll
    for (int i = 0; i < kParts - 1; ++i)
      copy_async(to + kTileBytes + i * kPartBytes + thread * 16, fields + i * kCodeBytes + place, true);
  }
  __device__ __forceinline__ void load(const uint8_t* tile, const uint8_t* fields, LanePlace place) {
    words[0] = *reinterpret_cast<const uint4*>(tile + place.weights);
    blocks = *reinterpret_cast<const uint32_t*>(tile + kPartBytes + place.scales) - beyond;
#pragma unroll
    for (int i = 1; i < kParts; ++i)
      words[i] = *reinterpret_cast<const uint4*>(fields + (i - 1) * kPartBytes + place.weights);
  }
  __device__ __forceinline__ static uint32_t element(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const uint4& low = words[1 + step / 2];
    join_fields(a, element(words[0], step), element(low, step % 2 * 2), element(low, step % 2 * 2 + 1), element(words[3], step),
                ScaledCodes::rows_scale(blocks, step));
  }
};

}  // namespace mlspec::portable
