// What does a tile of lookup-table planes hold, and how do its first b planes become the registers of operand A?
//
// A tile is 64 outputs x 128 inputs: plane 0 (the most significant), plane 1 and so on, 1 KiB each, and 16 bytes more for each
// block of 32 inputs that a weight's last tile lacks: b planes are a prefix of the tile. A plane is [w 4][lane 32][half tile 2]
// x one word, as bit-planes have it (../planes/planes_linear_format.cuh), but for the order within a word: weight n = 4 h + 2 t + e
// of step s has its bit of plane p at bit (4 n + s - p) mod 32, so that the weights of a row are side by side. Merged as bit-planes
// are and rotated, words hold the codes of a step's 8 weights as nibbles, or of half of them as bytes.
//
// Tables (lut_tables.cuh): up to three planes a lane has those of its rows in registers, of four one there and one in shared memory,
// so that two pipes share the work; from five on both stand in shared memory.
#pragma once

#include "../linear/linear.h"
#include "../linear/linear_formats.cuh"
#include "../planes/planes_linear_format.cuh"
#include "lut_tables.cuh"

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

// Where the tables of a width stand.
enum class Tables { kRegisters, kBoth, kShared };
template <int kPlanes>
constexpr Tables kTablesOf = kPlanes <= 3 ? Tables::kRegisters : kPlanes == 4 ? Tables::kBoth : Tables::kShared;

// The first kPlanes planes of any number of stored ones.
template <int kPlanesOf, Tables kTables = kTablesOf<kPlanesOf>>
struct LutWeights : LutPlanes<kPlanesOf> {
  static constexpr int kPlanes = kPlanesOf, kFields = PlaneWords<kPlanes>::kFields;

  RegisterTable<kPlanes> tables[2];  // of rows r and r + 8
  uint32_t two_to_16;

  template <class Params>
  __device__ __forceinline__ void prepare(const Params&) {
    two_to_16 = unknown_to_compiler(1 << 16);
  }
  template <class V, class Params>
  __device__ __forceinline__ void begin(const Params& p, uint8_t*, int tile, int warp, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) tables[h].fill(table_of(p, tile, warp % 4 * 16 + h * 8 + lane / 4, kPlanes));
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const uint32_t codes = rotated(this->word_of(step % 4 % kFields, step / 4), kPlanes - 1 - step % 4 & 31);
    const uint32_t index = codes & RegisterTable<kPlanes>::kIndexBits;
    tables[0].look_up(a[0], a[2], index, 0);
    tables[1].look_up(a[1], a[3], multiplied_high(index, two_to_16), 0);
  }
};

// Four planes: the pipe of permutations looks row r up, shared memory two weights of row r + 8 at once, side by side.
template <int kPlanesOf>
struct LutWeights<kPlanesOf, Tables::kBoth> : LutPlanes<kPlanesOf> {
  static constexpr int kPlanes = kPlanesOf;
  static constexpr int kTableBytes = PairTables::kBytes;

  RegisterTable<kPlanes> table;
  PairTables pairs;
  uint32_t powers[2];  // that bring bytes 2 and 3 to the codes' bits of an address

  template <class Params>
  __device__ __forceinline__ void prepare(const Params&) {
#pragma unroll
    for (int i = 0; i < 2; ++i) powers[i] = unknown_to_compiler(1 << (16 - 8 * i + PairTables::kShift));
  }
  template <class V, class Params>
  __device__ __forceinline__ void begin(const Params& p, uint8_t* shared, int tile, int warp, int lane) {
    pairs.fill(p, shared + warp / 4 % V::kTiles * kTableBytes, tile, warp / (4 * V::kTiles), V::kWarpGroups, warp, lane);
    table.fill(table_of(p, tile, warp % 4 * 16 + lane / 4, kPlanes));
    barrier_sync<V::kConsumers>();
  }
  // The highest bits of the lower four nibbles of `codes` as bytes of ones.
  __device__ __forceinline__ static uint32_t highest_bits(uint32_t codes) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, 0xD9C8;" : "=r"(d) : "r"(codes << 4), "r"(codes));
    return d;
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const uint32_t codes = rotated(this->word_of(step % 4, step / 4), kPlanes - 1 - step % 4);
    a[1] = pairs.pair(multiplied_high(codes, powers[0])), a[3] = pairs.pair(multiplied_high(codes, powers[1]));
    table.look_up(a[0], a[2], codes & RegisterTable<kPlanes>::kIndexBits, highest_bits(codes));
  }
};

// Five planes and more.
template <int kPlanesOf>
struct LutWeights<kPlanesOf, Tables::kShared> : LutPlanes<kPlanesOf> {
  static constexpr int kPlanes = kPlanesOf;
  static constexpr int kTurn = kPlanes >= 7 ? 1 : 2;  // two do not fit beside these tables and the sums of 8 blocks for 16 tokens
  static constexpr int kTableBytes = LaneTables<kPlanes>::kBytes;

  LaneTables<kPlanes> tables;
  uint32_t powers[3], first_power, two_to_16;  // that bring bytes 1 to 3, and 0, to a code's bits of an address

  template <class Params>
  __device__ __forceinline__ void prepare(const Params&) {
    first_power = unknown_to_compiler(1 << LaneTables<kPlanes>::kShift), two_to_16 = unknown_to_compiler(1 << 16);
#pragma unroll
    for (int i = 0; i < 3; ++i) powers[i] = unknown_to_compiler(1u << (24 - 8 * i + LaneTables<kPlanes>::kShift));
  }
  template <class V, class Params>
  __device__ __forceinline__ void begin(const Params& p, uint8_t* shared, int tile, int warp, int lane) {
    tables.fill(p, shared + warp / 4 % V::kTiles * kTableBytes, tile, warp / (4 * V::kTiles), V::kWarpGroups, warp, lane);
    barrier_sync<V::kConsumers>();
  }
  // Of the byte t + 2 h of both words.
  template <int kHalf>
  __device__ __forceinline__ uint32_t pair(uint32_t even, uint32_t odd, int t) const {
    const int byte = t + 2 * kHalf;
    const auto value = [&](uint32_t codes) {
      return tables.template value<kHalf>(byte ? multiplied_high(codes, powers[byte - 1]) : codes * first_power);
    };
    return multiplied_sum(value(odd), two_to_16, value(even));
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const int s = step % 4;
    const uint32_t even = rotated(this->word_of(s, step / 4), kPlanes - 1 - s & 31);
    const uint32_t odd = rotated(this->word_of(s + 4, step / 4), kPlanes - 5 - s & 31);
    a[0] = pair<0>(even, odd, 0), a[2] = pair<0>(even, odd, 1);
    a[1] = pair<1>(even, odd, 0), a[3] = pair<1>(even, odd, 1);
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

// The same tiles where one kernel serves every number of planes: planes that are not read are zero bits.
struct AnyLutWeights : LutPlanes<8> {
  static constexpr int kTableBytes = SharedTables::kBytes;

  SharedTables tables;
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
    SharedTables::fill(p, shared, tile, p.num_planes, threadIdx.x, blockDim.x);
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
