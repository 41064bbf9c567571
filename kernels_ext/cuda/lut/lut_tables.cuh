// Where do the tables of a tile of lookup-table planes stand while it is multiplied, and how is a value read?
//
// Tables are float16 as saved, a row an output, [ceil(out / 128) * 128][columns]; values are rounded to bfloat16 when a block
// begins a tile. A lane multiplies rows r and r + 8.
#pragma once

#include "../linear/linear_formats.cuh"

namespace mlspec {

// Where the values of `read` planes of an output begin.
template <class Params>
__device__ __forceinline__ const half* table_of(const Params& p, int tile, int row, int read) {
  const int stored = p.tile_stride / kPlaneBytes, start = p.table_columns - (2 << stored) + (1 << read);
  return p.tables + (size_t(tile) * kTileOutputs + row) * p.table_columns + start;
}

// Two values, rounded to bfloat16. Tables begin at even places.
__device__ __forceinline__ uint32_t value_pair(const half* from) {
  const float2 values = __half22float2(__ldg(reinterpret_cast<const half2*>(from)));
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(values.x, values.y);
  return *reinterpret_cast<const uint32_t*>(&rounded);
}

// The tables of a tile in shared memory for any number of planes, one row behind the other, each a bank further than the one before.
struct SharedTables {
  static constexpr int kBytes = kTileOutputs * ((1 << kMaxPlanes) + 2) * 2;
  const uint8_t* row;  // of output r of the lane

  __device__ __forceinline__ static int row_bytes(int read) { return ((1 << read) + 2) * 2; }
  // By `threads` threads.
  template <class Params>
  __device__ __forceinline__ static void fill(const Params& p, uint8_t* tables, int tile, int read, int thread, int threads) {
    for (int i = thread; i < kTileOutputs << (read - 1); i += threads) {
      const int output = i >> (read - 1), pair = i & ((1 << (read - 1)) - 1);
      *reinterpret_cast<uint32_t*>(tables + output * row_bytes(read) + pair * 4) =
          value_pair(table_of(p, tile, output, read) + 2 * pair);
    }
  }
  __device__ __forceinline__ void begin(const uint8_t* tables, int read, int warp, int lane) {
    row = tables + (warp % 4 * 16 + lane / 4) * row_bytes(read);
  }
  // h: row r + 8.
  __device__ __forceinline__ uint32_t value(int h, uint32_t code, int read) const {
    return *reinterpret_cast<const uint16_t*>(row + h * 8 * row_bytes(read) + code * 2);
  }
};

// The values of a row in a lane's registers, up to four planes; low bytes apart from high ones: nibbles are the selectors of byte
// permutations, which choose of 8 bytes.
template <int kPlanes>
struct RegisterTable {
  static constexpr int kHalves = kPlanes == 4 ? 2 : 1;
  static constexpr uint32_t kIndexBits = kPlanes == 4 ? 0x77777777 : ((1 << kPlanes) - 1) * 0x11111111u;
  uint32_t low[kHalves][2], high[kHalves][2];  // values 0 to 7, 8 to 15

  __device__ __forceinline__ void fill(const half* from) {
#pragma unroll
    for (int i = 0; i < 2 * kHalves; ++i) {  // four values at a time
      const bool first = 4 * i < 1 << kPlanes, second = 4 * i + 2 < 1 << kPlanes;
      const uint32_t pair = first ? value_pair(from + 4 * i) : 0, next = second ? value_pair(from + 4 * i + 2) : 0;
      low[i / 2][i % 2] = __byte_perm(pair, next, 0x6420), high[i / 2][i % 2] = __byte_perm(pair, next, 0x7531);
    }
  }
  // Four bytes; upper: 0xFF where values 8 to 15 are meant.
  __device__ __forceinline__ static uint32_t four(const uint32_t (&table)[kHalves][2], uint32_t selectors, uint32_t upper) {
    const uint32_t bytes = looked_up(table[0], selectors);
    if constexpr (kHalves == 1) return bytes;
    else return (looked_up(table[kHalves - 1], selectors) & upper) | (bytes & ~upper);
  }
  // The two registers of a row, by the lower four nibbles of `index`, whose other bits are 0.
  __device__ __forceinline__ void look_up(uint32_t& first, uint32_t& second, uint32_t index, uint32_t upper) const {
    const uint32_t l = four(low, index, upper), h = four(high, index, upper);
    first = __byte_perm(l, h, 0x5140), second = __byte_perm(l, h, 0x7362);
  }
};

// Of four planes, in shared memory: row r + 8's pairs of values by two codes side by side, [w 4][second code][first code][r] x one
// word, which is a register of operand A. Rows have four banks each. A warp's table is aligned to its size: codes moved to their
// bits of the address need no addition.
struct PairTables {
  static constexpr int kShift = 5, kWarpBytes = 256 << kShift, kBytes = 5 * kWarpBytes - 1024;  // wherever 1024 bytes begin
  static constexpr uint32_t kCodeBits = 0xFF << kShift;
  uint32_t base;

  // By `groups` groups of four warps, each its part: a lane the first codes q, q + 4 ...
  template <class Params>
  __device__ __forceinline__ void fill(const Params& p, uint8_t* tables, int tile, int group, int groups, int warp, int lane) {
    const uint32_t begin = -shared_address(tables) & (kWarpBytes - 1);
    uint8_t* own = tables + begin + warp % 4 * kWarpBytes + lane / 4 * 4;
    base = unknown_to_compiler(shared_address(own));
    const half* from = table_of(p, tile, warp % 4 * 16 + 8 + lane / 4, 4);
    const int q = lane % 4;
    uint32_t lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) lower[i] = __byte_perm(value_pair(from + 4 * i + (q & 2)), 0, q & 1 ? 0x4432 : 0x4410);
#pragma unroll 4
    for (int i = group; i < 8; i += groups) {  // two second codes
      const uint32_t pair = value_pair(from + 2 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint8_t* to = own + ((2 * i * 16 + 4 * j + q) << kShift);
        *reinterpret_cast<uint32_t*>(to) = lower[j] | pair << 16;
        *reinterpret_cast<uint32_t*>(to + (16 << kShift)) = lower[j] | (pair & 0xFFFF0000);
      }
    }
  }
  // moved: the codes at bit kShift, any bits beside them.
  __device__ __forceinline__ uint32_t pair(uint32_t moved) const {
    uint32_t d;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(d) : "r"((moved & kCodeBits) | base));
    return d;
  }
};

// The tables of a tile in shared memory where lanes meet few others' banks: [w 4][code][bank] x one word, row r in its lower half, row
// r + 8 in the upper. Up to six planes a lane has a bank of its own, of seven it shares one with another lane of its row, of eight
// with three. A warp's tables are aligned to their size: a code moved to its bits of the address needs no addition.
template <int kPlanes>
struct LaneTables {
  static constexpr int kShare = kPlanes <= 6 ? 1 : kPlanes == 7 ? 2 : 4;  // lanes a bank
  static constexpr int kCodeStride = 128 / kShare, kShift = 7 - kShare / 2;
  static constexpr int kWarpBytes = kCodeStride << kPlanes, kBytes = 5 * kWarpBytes - 1024;  // wherever 1024 bytes begin
  static constexpr uint32_t kCodeBits = ((1 << kPlanes) - 1) << kShift;
  static_assert(1 << kShift == kCodeStride, "a code is moved by whole bits");
  uint32_t base;

  // By `groups` groups of four warps, each its part.
  template <class Params>
  __device__ __forceinline__ void fill(const Params& p, uint8_t* tables, int tile, int group, int groups, int warp, int lane) {
    const uint32_t begin = -shared_address(tables) & (kWarpBytes - 1);
    uint8_t* own = tables + begin + warp % 4 * kWarpBytes;
    base = unknown_to_compiler(shared_address(own) + lane / kShare * 4);
    const half* from = table_of(p, tile, warp % 4 * 16 + lane / 4, kPlanes);
#pragma unroll 4
    for (int i = group * 4 + lane % 4; i < 1 << (kPlanes - 1); i += groups * 4) {  // two codes at a time, for four lanes
      const uint32_t row = value_pair(from + 2 * i), row8 = value_pair(from + 8 * p.table_columns + 2 * i);
      uint8_t* to = own + 2 * i * kCodeStride + lane / 4 * (16 / kShare);
      store(to, __byte_perm(row, row8, 0x5410)), store(to + kCodeStride, __byte_perm(row, row8, 0x7632));
    }
  }
  // In every bank of a row.
  __device__ __forceinline__ static void store(uint8_t* to, uint32_t word) {
    if constexpr (kShare == 1) *reinterpret_cast<uint4*>(to) = {word, word, word, word};
    else if constexpr (kShare == 2) *reinterpret_cast<uint2*>(to) = {word, word};
    else *reinterpret_cast<uint32_t*>(to) = word;
  }
  // kHalf: row r + 8. moved: the code at bit kShift, any bits beside it.
  template <int kHalf>
  __device__ __forceinline__ uint32_t value(uint32_t moved) const {
    uint16_t d;
    asm volatile("ld.shared.u16 %0, [%1 + %2];" : "=h"(d) : "r"((moved & kCodeBits) | base), "n"(2 * kHalf));
    return d;
  }
};

}  // namespace mlspec
