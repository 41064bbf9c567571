// What does a tile of lookup-table planes hold, and how do its first b planes become the registers of operand A?
//
// A tile is 64 outputs x 128 inputs: plane 0 (the most significant), plane 1 and so on, 1 KiB each, and 16 bytes more for each
// block of 32 inputs that a weight's last tile lacks: b planes are a prefix of the tile. A plane is [w 4][lane 32][half tile 2]
// x one word, as bit-planes have it (../planes/planes_linear_format.cuh), but for the order within a word: weight n = 4 h + 2 t + e
// of step s has its bit of plane p at bit (4 n + s - p) mod 32, so that the weights of a row are side by side. Merged as bit-planes
// are and rotated, words hold the codes of a step's 8 weights as nibbles, or of half of them as bytes.
//
// The tables are float16 as saved, a row an output, [ceil(out / 128) * 128][columns]; values are rounded to bfloat16 when a block
// begins a tile. A lane multiplies rows r and r + 8. Up to four planes, their 16 values stand in its registers, low bytes apart
// from high ones: nibbles are the selectors of byte permutations. From five on the tables of the tile stand in shared memory.
#pragma once

#include "../linear/linear.h"
#include "../linear/linear_formats.cuh"
#include "../planes/planes_linear_format.cuh"

namespace mlspec {

// Null, or what is wrong with the weight.
inline const char* problem_of_lut(const mlspec_cuda_linear& a) {
  const int64_t stored = a.tile_stride / kPlaneBytes, lacking = (kTileInputs - a.in_features % kTileInputs) % kTileInputs / kBlock;
  if (a.activation_bits != 16) return "activation_bits of lookup-table planes must be 16";
  if (stored < 1 || stored > kMaxPlanes || a.tile_stride % kPlaneBytes != 16 * lacking)
    return "tile_stride is not that of 1 to 8 planes and the blocks of inputs that the last tile lacks";
  const int64_t least = least_planes_of(stored, a.table_columns);
  if (!a.tables || !least) return "lookup-table planes need tables of S, S + 1 ... stored bits";
  if (a.num_planes < least || a.num_planes > stored) return "num_planes must be the width of one of the tables";
  return nullptr;
}

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

// The tables of a tile in shared memory, one row behind the other, each a bank further than the one before it.
template <int kMostPlanes>
struct SharedTables {
  static constexpr int kBytes = kTileOutputs * ((1 << kMostPlanes) + 2) * 2;
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

// What all widths have in common.
template <int kPlanesOf>
struct LutPlanes : PlaneWords<kPlanesOf>, PackedTiles {
  static constexpr int kGroups = 0, kActivationBits = 16;
  static constexpr bool kPrefix = true, kTables = true;
  static constexpr float kOutScale = 1;
  static constexpr int kTileBytes = kPlanesOf * kPlaneBytes;

  __device__ __forceinline__ static LanePlace place(int warp, int lane) { return {PlaneWords<kPlanesOf>::place(warp, lane), 0}; }
  template <class Params>
  __device__ __forceinline__ static float out_scale(const Params&) {
    return 1;
  }
  __device__ __forceinline__ void load(const uint8_t* tile, LanePlace place) {
#pragma unroll
    for (int p = 0; p < kPlanesOf; ++p) {
      const uint2 v = *reinterpret_cast<const uint2*>(tile + p * kPlaneBytes + place.weights);
      this->planes[p][0] = v.x, this->planes[p][1] = v.y;
    }
  }
};

// The first kPlanes planes of any number of stored ones.
template <int kPlanesOf, bool kInRegisters = kPlanesOf <= 4>
struct LutWeights : LutPlanes<kPlanesOf> {
  static constexpr int kPlanes = kPlanesOf, kFields = PlaneWords<kPlanes>::kFields;
  static constexpr int kHalves = kPlanes == 4 ? 2 : 1;  // a permutation chooses of 8 bytes
  static constexpr uint32_t kIndexBits = kPlanes == 4 ? 0x77777777 : ((1 << kPlanes) - 1) * 0x11111111u;

  uint32_t low[2][kHalves][2], high[2][kHalves][2];  // of rows r and r + 8: bytes of values 0 to 7, 8 to 15
  uint32_t two_to_16;

  template <class Params>
  __device__ __forceinline__ void prepare(const Params&) {
    two_to_16 = unknown_to_compiler(1 << 16);
  }
  template <class V, class Params>
  __device__ __forceinline__ void begin(const Params& p, uint8_t*, int tile, int warp, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const half* from = table_of(p, tile, warp % 4 * 16 + h * 8 + lane / 4, kPlanes);
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i) {  // four values at a time
        const bool first = 4 * i < 1 << kPlanes, second = 4 * i + 2 < 1 << kPlanes;
        const uint32_t pair = first ? value_pair(from + 4 * i) : 0, next = second ? value_pair(from + 4 * i + 2) : 0;
        low[h][i / 2][i % 2] = __byte_perm(pair, next, 0x6420), high[h][i / 2][i % 2] = __byte_perm(pair, next, 0x7531);
      }
    }
  }
  // Four bytes of a row's table; upper: 0xFF where values 8 to 15 are meant.
  __device__ __forceinline__ static uint32_t four(const uint32_t (&table)[kHalves][2], uint32_t selectors, uint32_t upper) {
    const uint32_t bytes = looked_up(table[0], selectors);
    if constexpr (kHalves == 1) return bytes;
    else return (looked_up(table[kHalves - 1], selectors) & upper) | (bytes & ~upper);
  }
  // The highest bits of four nibbles of `codes`, the lower ones or the upper ones, as bytes of ones.
  template <int kHalf>
  __device__ __forceinline__ static uint32_t highest_bits(uint32_t codes) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(codes << 4), "r"(codes), "n"(kHalf ? 0xFBEA : 0xD9C8));
    return d;
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const uint32_t codes = rotated(this->word_of(step % 4 % kFields, step / 4), kPlanes - 1 - step % 4 & 31);
    const uint32_t index = codes & kIndexBits;
    uint32_t upper = 0, upper8 = 0;
    if constexpr (kHalves == 2) upper = highest_bits<0>(codes), upper8 = highest_bits<1>(codes);
    const uint32_t l = four(low[0], index, upper), h = four(high[0], index, upper);
    const uint32_t index8 = upper_half(index, two_to_16);  // of row r + 8
    const uint32_t l8 = four(low[1], index8, upper8), h8 = four(high[1], index8, upper8);
    a[0] = __byte_perm(l, h, 0x5140), a[2] = __byte_perm(l, h, 0x7362);
    a[1] = __byte_perm(l8, h8, 0x5140), a[3] = __byte_perm(l8, h8, 0x7362);
  }
};

// Registers of a step from the words of its even and of its odd weights, codes in the lower bits of their bytes; by byte, t + 2 h.
template <class Look>
__device__ __forceinline__ void look_up_bytes(uint32_t (&a)[4], uint32_t even, uint32_t odd, Look look) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
      a[h + 2 * t] = look(h, even >> 8 * (t + 2 * h)) | look(h, odd >> 8 * (t + 2 * h)) << 16;
  }
}

template <int kPlanesOf>
struct LutWeights<kPlanesOf, false> : LutPlanes<kPlanesOf> {
  static constexpr int kPlanes = kPlanesOf;
  static constexpr int kTableBytes = SharedTables<kPlanes>::kBytes;
  static constexpr int kTurn = kPlanes == 8 ? 1 : 2;  // beside tables of 8 planes 8 blocks' sums of 16 tokens leave 3 stages

  SharedTables<kPlanes> tables;

  template <class Params>
  __device__ __forceinline__ void prepare(const Params&) {}
  template <class V, class Params>
  __device__ __forceinline__ void begin(const Params& p, uint8_t* shared, int tile, int warp, int lane) {
    uint8_t* own = shared + warp / 4 % V::kTiles * kTableBytes;
    const int group = warp / (4 * V::kTiles);
    tables.fill(p, own, tile, kPlanes, group * 128 + warp % 4 * 32 + lane, V::kWarpGroups * 128);
    tables.begin(own, kPlanes, warp, lane);
    barrier_sync<V::kConsumers>();
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const int s = step % 4;
    const uint32_t even = rotated(this->word_of(s, step / 4), kPlanes - 1 - s & 31);
    const uint32_t odd = rotated(this->word_of(s + 4, step / 4), kPlanes - 5 - s & 31);
    look_up_bytes(a, even, odd, [&](int h, uint32_t code) { return tables.value(h, code & ((1 << kPlanes) - 1), kPlanes); });
  }
};

// The same tiles where one kernel serves every number of planes: planes that are not read are zero bits.
struct AnyLutWeights : LutPlanes<8> {
  static constexpr int kTableBytes = SharedTables<8>::kBytes;

  SharedTables<8> tables;
  int num_planes;

  template <class Params>
  __device__ __forceinline__ static int bytes_read(const Params& p) {
    return p.num_planes * kPlaneBytes;
  }
  template <class Params>
  __device__ __forceinline__ void prepare(const Params& p) {
    num_planes = p.num_planes;
  }
  // By all threads of a block.
  template <class Params>
  __device__ __forceinline__ static void fill_tables(const Params& p, uint8_t* shared, int tile) {
    SharedTables<8>::fill(p, shared, tile, p.num_planes, threadIdx.x, blockDim.x);
    __syncthreads();
  }
  __device__ __forceinline__ void begin(const uint8_t* shared, int warp, int lane) { tables.begin(shared, num_planes, warp, lane); }
  __device__ __forceinline__ void load(const uint8_t* tile, LanePlace place) {
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      uint2 v = {0, 0};
      if (p < num_planes) v = *reinterpret_cast<const uint2*>(tile + p * kPlaneBytes + place.weights);
      planes[p][0] = v.x, planes[p][1] = v.y;
    }
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const int s = step % 4, unread = 8 - num_planes;
    const uint32_t even = rotated(word_of(s, step / 4), 7 - s), odd = rotated(word_of(s + 4, step / 4), 3 - s);
    look_up_bytes(a, even, odd, [&](int h, uint32_t code) { return tables.value(h, (code & 0xFF) >> unread, num_planes); });
  }
};

}  // namespace mlspec
