// Which sizes and codes do weight formats and their tiles have? Said here alone: the kernels of CPUs and GPUs and their bindings
// include this, and tests/ops/test_layout_sizes.py compares it with what Python says. Layouts are drawn in cpu/kernels.h,
// cuda/linear/linear_formats.cuh and hf_mlspec/ops/tiles*.py.
#pragma once
#include <stdint.h>

namespace mlspec {

inline constexpr int64_t kBlock = 32;  // elements along `in` of one E8M0 scale, and of a step of the CPU's tiles
inline constexpr int64_t kGroupSizes[] = {32, 64, 128};  // elements along `in` of one scale of int4 or bit-planes
inline constexpr double kLeastClip = 0.1;  // of 4-bit activations
inline constexpr int64_t kMaxPlanes = 8;
inline constexpr int64_t kOutliers = 128;      // int8 columns of an int4 weight that has some: two groups of nibbles
inline constexpr int64_t kCodebookLevels = 8;  // of a nested weight's draft, without their signs

// What E2M1's codes 0..7 mean, 8..15 are their negatives; and twice what they mean, integers. A kernel copies the table to where
// it reads it: the compiler then knows every entry there.
template <class Number>
struct EightMagnitudes {
  Number of[8];
};
inline constexpr EightMagnitudes<float> kMagnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
inline constexpr EightMagnitudes<int> kDoubledMagnitudes = {0, 1, 2, 3, 4, 6, 8, 12};

constexpr bool is_group_size(int64_t elements) {
  for (const int64_t size : kGroupSizes)
    if (elements == size) return true;
  return false;
}

// S of tables of S, S + 1 ... `stored` bits, 2^(stored + 1) - 2^S values in all; 0 where no S has so many columns.
constexpr int64_t least_planes_of(int64_t stored, int64_t columns) {
  for (int64_t least = 1; least <= stored; ++least)
    if ((int64_t{2} << stored) - (int64_t{1} << least) == columns) return least;
  return 0;
}

// On the CPU a tile is 16 outputs, and a step of it one block; bytes are those of a step.
namespace cpu_tiles {

inline constexpr int64_t kTileOutputs = 16;  // the lanes of a 512-bit register
inline constexpr int64_t kTileBytes = kTileOutputs * kBlock / 2;
inline constexpr int64_t kLowTileBytes = kTileOutputs * kBlock * 12 / 8;  // a nested weight's other bits
inline constexpr int64_t kPlaneBytes = kTileOutputs * kBlock / 8;         // of one plane
static_assert(kTileBytes == 4 * 16 * 4, "[4][16][4] bytes, two codes each");

}  // namespace cpu_tiles

// On a GPU a tile is 64 outputs x 128 inputs, and two of them, one below the other, lie side by side.
namespace gpu_tiles {

inline constexpr int kTileOutputs = 64, kTileInputs = 128;
inline constexpr int kCodeBytes = kTileOutputs * kTileInputs / 2;  // 4 bits of a tile
inline constexpr int kFieldBytes = 3 * kCodeBytes;                 // 12 bits of a tile: a nested weight's other bits
inline constexpr int kPlaneBytes = kTileOutputs * kTileInputs / 8;

inline constexpr int64_t kPairOutputs = 2 * kTileOutputs, kPairInputs = kTileInputs;
inline constexpr int64_t kPairDraftBytes = 2 * kCodeBytes + kPairOutputs * (kPairInputs / kBlock);  // nibbles and exponents
inline constexpr int64_t kPairLowBytes = 2 * kFieldBytes;
inline constexpr int64_t kPairPlaneBytes = 2 * kPlaneBytes;

}  // namespace gpu_tiles

}  // namespace mlspec
