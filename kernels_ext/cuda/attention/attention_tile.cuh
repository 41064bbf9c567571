// How does a group of four warps attend: 16 to 64 query rows over chunks of 64 slots, bfloat16 tensor cores?
//
// The query rows of a tile are tokens x query heads of one key head, row = token * group + head. Scores: warp w multiplies all
// rows with slots 16 w .. 16 w + 15 of the chunk. Weights go through shared memory, then warp w multiplies them with a quarter of
// the values' elements, all 64 slots in ascending order. A row's softmax keeps a running maximum and sum (Milakov and Gimelshein
// 2018; tiled as in FlashAttention, Dao et al. 2022). Slots a row may not see get weight 0 and change none of its bits, so a row
// does not notice which chunks the other rows of its tile need.
#pragma once

#include <math_constants.h>

#include "attention_ptx.cuh"
#include "../mma.cuh"
#include "../rows/row_launch.cuh"

namespace mlspec {

constexpr int kChunk = 64, kAttendWarps = 4, kAttendThreads = kAttendWarps * kWarp;
constexpr int kPad = 8;  // elements behind a row in shared memory: rows of a matrix load lie in different banks

// kDim: elements of a head, rounded up; what is behind its own is zero. kTiles: of 16 query rows. kBits: 0, or keys and values are
// rows of codes of so many bits, which lanes hold as they are (attention_codes.cuh). kFew: eight query rows at most, so that the
// second half of the tile is neither kept nor scored, and heads of kDim elements; a row's bits are the same.
template <int kDim_, int kTiles_, int kBits_, bool kFew_ = false>
struct AttentionShape {
  static constexpr bool kFew = kFew_;
  static constexpr int kDim = kDim_, kTiles = kTiles_, kHalves = kFew ? 1 : 2, kRows = 8 * kHalves * kTiles;
  static constexpr int kResults = 2 * kHalves;  // of the four of a tensor core's tile that a thread has, the first ones are rows'
  static constexpr int kBits = kBits_, kLeastStages = kBits ? 2 : 1;
  static constexpr int kStride = kDim + kPad, kWeightStride = kChunk + kPad;  // elements
  static constexpr int kOutTiles = kDim / kAttendWarps / 8;                   // of 8 elements, of one warp
  static constexpr int kQueryBytes = kRows * kStride * 2 + (kBits == 4 ? kRows * 4 : 0);  // sums of queries behind them
  static constexpr int kLaneBytes = kChunk * (kBits ? kDim * kBits / 8 + kTailBytes : kStride * 2), kStageBytes = 2 * kLaneBytes;
  static constexpr int kWeightBytes = kRows * kWeightStride * 2, kWarpBytes = kAttendWarps * kRows * 4;
  static constexpr int kOutStride = kDim + kPad;  // floats: what a group has found takes the place of its lanes
  static constexpr int kFoundBytes = kRows * kOutStride * 4, kMissing = kFoundBytes - kLeastStages * kStageBytes;
  static constexpr int kApartBytes = kMissing > 0 ? kMissing : 0;  // in front of the lanes
  static constexpr int kStatBytes = kRows * 16, kFrontBytes = kWeightBytes + 2 * kWarpBytes + kStatBytes;  // of a group
  static_assert(kBits || kApartBytes == 0, "sums must fit into the lanes");
  static_assert(!kFew || (kBits && kTiles == 1), "a few rows are half a tile, over codes");
  static_assert(kApartBytes % 16 == 0 && kLaneBytes % 16 == 0, "lanes begin at multiples of 16 bytes");
  __host__ __device__ static constexpr int group_bytes(int stages) { return kFrontBytes + kApartBytes + stages * kStageBytes; }
  static constexpr int shared_bytes(int groups, int stages) { return kQueryBytes + groups * group_bytes(stages); }
  __host__ __device__ static constexpr int dim_of(int64_t dim) { return kFew ? kDim : int(dim); }
};

// Where a thread reads operand A of a tile's rows, which lie in shared memory from `rows` on. A few rows stand in both halves: what
// becomes of the second one is not looked at, and to zero registers would cost more.
template <class Shape>
__device__ __forceinline__ uint32_t row_operands(uint32_t rows, int stride) {
  const int lane = threadIdx.x % kWarp, matrix = lane / 8;
  return rows + uint32_t((matrix % Shape::kHalves * 8 + lane % 8) * stride + matrix / 2 * 8) * 2;
}

// 2^(value * slope - most), 0 for values of -inf even where the maximum is. slope: positive.
__device__ __forceinline__ float weight_of(float value, float most, float slope = 1.f) {
  return exp2_approximate(fmaf(value, slope, most == -CUDART_INF_F ? 0.f : -most));
}

// A weight as it multiplies the codes of a value. One of 0 stays 0 under a scale of NaN: its slot may be no one's.
__device__ __forceinline__ float scaled_weight(float weight, float scale) { return weight == 0.f ? 0.f : __fmul_rn(weight, scale); }

// Scores are values * slope, in powers of two. Values are products of queries and keys; where those have to be shaped,
// products * inner, under a softcap tanh(products * inner) * outer.
struct ScoreRule {
  float slope, inner, outer;
  bool shaped, capped;
  int window, recent;  // how many slots up to its own a token sees, of the first chunk and of those behind it; 0: all

  __device__ __forceinline__ int window_at(int first_slot) const { return first_slot == 0 ? window : recent; }

  __device__ __forceinline__ float shape(float product) const {
    const float value = __fmul_rn(product, inner);
    return capped ? __fmul_rn(tanhf(value), outer) : value;
  }
};

// The maximum, sum of weights and weighted sum of values of this thread's rows: 16 i + lane / 4 and 8 behind it. Until a rank ends
// a sum is that of the thread's own slots.
template <class Shape>
struct Attended {
  float largest[Shape::kTiles][2], sum[Shape::kTiles][2];
  float out[Shape::kTiles][Shape::kOutTiles][4];
  float shift[Shape::kBits == 4 ? Shape::kTiles : 1][2];  // of int4 codes, until the rank ends: weights times zeros

  // What tile n's columns 2 (lane % 4) + e of the thread's warp are of a head. Those of codes lie one behind the other in tiles.
  __device__ __forceinline__ static int element(int n, int e) {
    const int warp = threadIdx.x / kWarp % kAttendWarps, column = threadIdx.x % 4 * 2 + e;
    return warp * Shape::kOutTiles * 8 + (Shape::kBits ? column * Shape::kOutTiles + n : n * 8 + column);
  }

  __device__ __forceinline__ void rescale(const float (&factor)[Shape::kTiles][2]) {
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
      for (int n = 0; n < Shape::kOutTiles; ++n)
#pragma unroll
        for (int e = 0; e < Shape::kResults; ++e) out[i][n][e] = __fmul_rn(out[i][n][e], factor[i][e / 2]);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i) {
#pragma unroll
      for (int r = 0; r < Shape::kHalves; ++r) largest[i][r] = -CUDART_INF_F, sum[i][r] = 0.f;
#pragma unroll
      for (int n = 0; n < Shape::kOutTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][n][e] = 0.f;
      if constexpr (Shape::kBits == 4) shift[i][0] = shift[i][1] = 0.f;
    }
  }
};

// One rank's numbers behind those of the ranks before it: the same operations wherever they are done.
struct Merge {
  float largest, own, other;  // the new maximum; the factors of what is there and of what comes

  __device__ __forceinline__ Merge(float there, float comes) : largest(fmaxf(there, comes)) {
    own = weight_of(there, largest);
    other = weight_of(comes, largest);
  }
  __device__ __forceinline__ float operator()(float there, float comes) const {
    return fmaf(there, own, __fmul_rn(comes, other));
  }
};

// A weighted sum times its share (attention_walk.cuh). Adding 0 makes -0 of rows that others had to wait for +0.
__device__ __forceinline__ float finished(float out, float share) { return fmaf(out, share, 0.f); }

// Of the four lanes that share a row.
__device__ __forceinline__ float sum_of_lanes(float value) {
  value = __fadd_rn(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
  return __fadd_rn(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

struct AsTheyAre {
  __device__ __forceinline__ uint32_t operator()(int, float low, float high) const { return narrowed(low, high); }
};

template <class Shape>
struct AttentionGroup {
  uint32_t queries, weights;  // shared memory addresses
  float *maxima, *sums;       // [warps][rows]
  int number;                 // of the group

  __device__ __forceinline__ uint32_t lane_address(uint32_t base, int stride, int row, int column) const {
    return base + uint32_t(row * stride + column) * 2;
  }

  // products[tile][n][.]: rows of the tiles with slots 16 warp + 8 n .. of the chunk.
  __device__ __forceinline__ void multiply_keys(uint32_t keys, float (&products)[Shape::kTiles][2][4]) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kAttendWarps, matrix = lane / 8;
    const uint32_t key = lane_address(keys, Shape::kStride, warp * 16 + matrix / 2 * 8 + lane % 8, matrix % 2 * 8);
    const uint32_t query = lane_address(queries, Shape::kStride, matrix % 2 * 8 + lane % 8, matrix / 2 * 8);
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) products[i][n][e] = 0.f;
#pragma unroll
    for (int k = 0; k < Shape::kDim / 16; ++k) {
      uint32_t b[4];
      load_matrices(b, key + k * 32);
#pragma unroll
      for (int i = 0; i < Shape::kTiles; ++i) {
        uint32_t a[4];
        load_matrices(a, query + i * 16 * Shape::kStride * 2 + k * 32);
        mma(products[i][0], a, b[0], b[1]);
        mma(products[i][1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ static void shape(const ScoreRule& rule, float (&products)[Shape::kTiles][2][4]) {
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < Shape::kResults; ++e) products[i][n][e] = rule.shape(products[i][n][e]);
  }

  // Products -> values, -inf where the row (at position limit, -1: none) may not see the slot; maxima of rows.
  __device__ __forceinline__ void score(const ScoreRule& rule, int first_slot, const int (&limit)[Shape::kTiles][2],
                                        float (&products)[Shape::kTiles][2][4]) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kAttendWarps, window = rule.window_at(first_slot);
    if (rule.shaped) shape(rule, products);
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i) {
#pragma unroll
      for (int r = 0; r < Shape::kHalves; ++r) {
        float most = -CUDART_INF_F;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& value = products[i][n][2 * r + e];
            const int slot = first_slot + warp * 16 + n * 8 + lane % 4 * 2 + e;
            const bool seen = slot <= limit[i][r] && (window == 0 || slot > limit[i][r] - window);
            value = seen ? value : -CUDART_INF_F;
            most = fmaxf(most, value);
          }
        }
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
        if (lane % 4 == 0) maxima[warp * Shape::kRows + i * 16 + r * 8 + lane / 4] = most;
      }
    }
  }

  // Values -> weights in shared memory; what was attended so far comes to the new maximum. factor: by how much. narrow: two
  // weights of slots 8 n + lane % 4 * 2 of the warp's, as they are multiplied.
  template <class Narrow>
  __device__ __forceinline__ void weigh(const ScoreRule& rule, const float (&scores)[Shape::kTiles][2][4], Attended<Shape>& state,
                                        float (&factor)[Shape::kTiles][2], const Narrow& narrow) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kAttendWarps;
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i) {
#pragma unroll
      for (int r = 0; r < Shape::kHalves; ++r) {
        const int row = i * 16 + r * 8 + lane / 4;
        float most = maxima[row];
#pragma unroll
        for (int w = 1; w < kAttendWarps; ++w) most = fmaxf(most, maxima[w * Shape::kRows + row]);
        most = fmaxf(state.largest[i][r], __fmul_rn(most, rule.slope));
        factor[i][r] = weight_of(state.largest[i][r], most);
        state.largest[i][r] = most;
        float sum[2], shift[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float low = weight_of(scores[i][n][2 * r], most, rule.slope);
          const float high = weight_of(scores[i][n][2 * r + 1], most, rule.slope);
          sum[n] = __fadd_rn(low, high);
          const uint32_t to = lane_address(weights, Shape::kWeightStride, row, warp * 16 + n * 8 + lane % 4 * 2);
          store_shared(to, narrow(n, low, high));
          if constexpr (Shape::kBits == 4) shift[n] = narrow.shift(n, low, high);
        }
        if constexpr (Shape::kBits == 4) state.shift[i][r] = fmaf(state.shift[i][r], factor[i][r], __fadd_rn(shift[0], shift[1]));
        state.sum[i][r] = fmaf(state.sum[i][r], factor[i][r], __fadd_rn(sum[0], sum[1]));
      }
    }
  }

  __device__ __forceinline__ void put_parts(float* parts, const float (&of)[Shape::kTiles][2]) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kAttendWarps;
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
      for (int r = 0; r < Shape::kHalves; ++r) {
        const float sum = sum_of_lanes(of[i][r]);
        if (lane % 4 == 0) parts[warp * Shape::kRows + i * 16 + r * 8 + lane / 4] = sum;
      }
  }
  __device__ __forceinline__ float whole(const float* parts, int i, int r) const {
    parts += i * 16 + r * 8 + threadIdx.x % kWarp / 4;
    float sum = parts[0];
#pragma unroll
    for (int w = 1; w < kAttendWarps; ++w) sum = __fadd_rn(sum, parts[w * Shape::kRows]);
    return sum;
  }

  // A rank has ended: the sums of all slots. Maxima were read, so what zeros add goes there.
  __device__ __forceinline__ void complete_sums(Attended<Shape>& state) const {
    put_parts(sums, state.sum);
    if constexpr (Shape::kBits == 4) put_parts(maxima, state.shift);
    sync_group(number);
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
      for (int r = 0; r < Shape::kHalves; ++r) {
        state.sum[i][r] = whole(sums, i, r);
        if constexpr (Shape::kBits == 4) {
          const float shift = whole(maxima, i, r);
#pragma unroll
          for (int n = 0; n < Shape::kOutTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) state.out[i][n][2 * r + e] = __fadd_rn(state.out[i][n][2 * r + e], shift);
        }
      }
  }

  __device__ __forceinline__ void multiply_values(uint32_t values, const float (&factor)[Shape::kTiles][2],
                                                  Attended<Shape>& state) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kAttendWarps, matrix = lane / 8;
    const uint32_t value = lane_address(values, Shape::kStride, matrix % 2 * 8 + lane % 8,
                                        warp * Shape::kOutTiles * 8 + matrix / 2 * 8);
    const uint32_t weight = lane_address(weights, Shape::kWeightStride, matrix % 2 * 8 + lane % 8, matrix / 2 * 8);
    state.rescale(factor);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      uint32_t a[Shape::kTiles][4];
#pragma unroll
      for (int i = 0; i < Shape::kTiles; ++i) load_matrices(a[i], weight + i * 16 * Shape::kWeightStride * 2 + k * 32);
#pragma unroll
      for (int n = 0; n < Shape::kOutTiles; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, value + k * 16 * Shape::kStride * 2 + n * 16);
#pragma unroll
        for (int i = 0; i < Shape::kTiles; ++i) {
          mma(state.out[i][n], a[i], b[0], b[1]);
          mma(state.out[i][n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace mlspec
