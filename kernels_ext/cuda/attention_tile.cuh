// How does one warp attend: 8 to 24 query rows over spans of 32 slots, on bfloat16 tensor cores, without shared memory?
//
// Slots and elements are the rows of the tensor cores' products, queries their columns: 8 queries are enough to fill them. Keys
// and values go from the cache straight into the registers that the tensor cores read, 16 bytes a load: which element of a head
// and which slot stands where in a product is free, as long as both operands agree. Lane = 4 r + q holds of 16 slots
//   keys:    slots r and r + 8, elements 32 i + 8 q .. + 7: two steps of 16 elements for each i
//   values:  slots 2 q, 2 q + 1, 2 q + 8, 2 q + 9, elements 64 h + 8 r .. + 7: pairs of slots are woven together on the way
//   scores:  slots r and r + 8 of queries 2 q, 2 q + 1; sums: elements 64 h + 8 r .. + 7 of the same queries.
// A row's softmax keeps a running maximum and sum (Milakov and Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022).
// Slots a row may not see get weight 0 and change none of its bits, so a row does not notice which spans its neighbours need.
#pragma once

#include <math_constants.h>

#include "attention_ptx.cuh"
#include "mma.cuh"
#include "row_launch.cuh"

namespace mlspec {

constexpr int kSpan = 32;  // slots
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// kDim: elements of a head, rounded up unless kWhole. kTiles: of 8 query rows.
template <int kDim_, int kTiles_, bool kWhole_>
struct AttentionShape {
  static constexpr int kDim = kDim_, kTiles = kTiles_, kRows = 8 * kTiles;
  static constexpr bool kWhole = kWhole_;
  static constexpr int kKeyVectors = kDim / 32, kValueVectors = kDim / 64;  // of a lane and slot
  static constexpr int kItems = kTiles * kDim / 16;  // float4 of a lane that hold its sums
};

// 2^(value - most), 0 for values of -inf even where the maximum is.
__device__ __forceinline__ float weight_of(float value, float most) {
  return exp2_approximate(value - (most == -CUDART_INF_F ? 0.f : most));
}

// What scores go through, all in powers of two: products * inner, or tanh(products * inner) * outer under a softcap.
struct ScoreRule {
  float inner, outer;
  bool capped;
  int window;
};

// The rows of one key head in the cache. Slots from `slots` on do not exist.
struct Lanes {
  const __nv_bfloat16 *keys, *values;
  int dim, slots;

  // Of a slot that may be behind the last: the last one.
  __device__ __forceinline__ int64_t row(int slot) const { return int64_t(min(slot, slots - 1)) * dim; }

  // Elements from `at` on of slot first + behind, at: of this lane, step: the same for all. kInside: the slot exists; then, with a
  // head's size known, all of a lane's vectors lie at fixed distances. Behind a head's last element stand its first ones:
  // queries are 0 there, and results are not written.
  template <class Shape, bool kInside>
  __device__ __forceinline__ uint4 load(const __nv_bfloat16* from, int first, int behind, int at, int step) const {
    if constexpr (Shape::kWhole && kInside)
      from += int64_t(first) * Shape::kDim + at + (behind * Shape::kDim + step);
    else
      from += row(first + behind) + (at + step < dim ? at + step : 0);
    return *reinterpret_cast<const uint4*>(from);
  }
};

template <class Shape>
struct Queries {
  uint4 vectors[Shape::kTiles][Shape::kKeyVectors];
  int limit[Shape::kTiles][2];  // the last position that rows 2 q, 2 q + 1 of a tile may see; -1: none
};

// Keys of 16 slots from `first` on.
template <class Shape>
struct Keys {
  uint4 vectors[2][Shape::kKeyVectors];

  template <bool kInside>
  __device__ __forceinline__ void load(const Lanes& lanes, int first) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < Shape::kKeyVectors; ++i)
        vectors[half][i] = lanes.load<Shape, kInside>(lanes.keys, first + lane / 4, half * 8, lane % 4 * 8, i * 32);
  }

  // scores[tile][.]: of all queries. Even and odd steps are summed apart: two short chains.
  __device__ __forceinline__ void multiply(const Queries<Shape>& queries, float (&scores)[Shape::kTiles][4]) const {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int i = 0; i < Shape::kKeyVectors; ++i) {
        const uint4 low = vectors[0][i], high = vectors[1][i], query = queries.vectors[t][i];
        const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
        mma(even, first, query.x, query.y);
        mma(odd, second, query.z, query.w);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[t][e] = __fadd_rn(even[e], odd[e]);
    }
  }
};

// Values of 16 slots from `first` on; zeros from `end` on.
template <class Shape>
struct Values {
  uint4 vectors[4][Shape::kValueVectors];

  __device__ __forceinline__ static int behind(int s) { return s / 2 * 8 + s % 2; }

  template <bool kInside>
  __device__ __forceinline__ void load(const Lanes& lanes, int first) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int h = 0; h < Shape::kValueVectors; ++h)
        vectors[s][h] = lanes.load<Shape, kInside>(lanes.values, first + lane % 4 * 2, behind(s), lane / 4 * 8, h * 64);
  }

  // What stands behind the end may be NaN, which a weight of 0 does not cancel.
  __device__ __forceinline__ void cut(int first, int end) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int h = 0; h < Shape::kValueVectors; ++h)
        if (first + int(threadIdx.x) % 4 * 2 + behind(s) >= end) vectors[s][h] = make_uint4(0, 0, 0, 0);
  }

  // sums[tile][.] += values x weights[tile].
  __device__ __forceinline__ void multiply(const uint32_t (&weights)[Shape::kTiles][2],
                                           float (&sums)[Shape::kTiles][Shape::kDim / 16][4]) const {
#pragma unroll
    for (int h = 0; h < Shape::kValueVectors; ++h) {
      const uint32_t words[4][4] = {{vectors[0][h].x, vectors[1][h].x, vectors[2][h].x, vectors[3][h].x},
                                    {vectors[0][h].y, vectors[1][h].y, vectors[2][h].y, vectors[3][h].y},
                                    {vectors[0][h].z, vectors[1][h].z, vectors[2][h].z, vectors[3][h].z},
                                    {vectors[0][h].w, vectors[1][h].w, vectors[2][h].w, vectors[3][h].w}};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t woven[4] = {halves<0>(words[j][0], words[j][1]), halves<1>(words[j][0], words[j][1]),
                                   halves<0>(words[j][2], words[j][3]), halves<1>(words[j][2], words[j][3])};
#pragma unroll
        for (int t = 0; t < Shape::kTiles; ++t) mma(sums[t][h * 4 + j], woven, weights[t][0], weights[t][1]);
      }
    }
  }
};

// The quotient that is the result; 0 for rows without slots. Adding 0 makes -0 of rows that others had to wait for +0.
__device__ __forceinline__ float finished(float out, float sum) {
  return fmaf(out, sum == 0.f ? 0.f : 1.f / sum, 0.f);
}

// The maximum, sum of weights and weighted sum of values of rows 2 q, 2 q + 1 of each tile. sum: of this lane's slots until
// finish_sums().
template <class Shape>
struct Attended {
  float largest[Shape::kTiles][2], sum[Shape::kTiles][2];
  float out[Shape::kTiles][Shape::kDim / 16][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) {
#pragma unroll
      for (int p = 0; p < 2; ++p) largest[t][p] = -CUDART_INF_F, sum[t][p] = 0.f;
#pragma unroll
      for (int n = 0; n < Shape::kDim / 16; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[t][n][e] = 0.f;
    }
  }

  __device__ __forceinline__ void finish_sums() {
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t)
#pragma unroll
      for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2)
          sum[t][p] = __fadd_rn(sum[t][p], __shfl_xor_sync(kAllLanes, sum[t][p], step));
  }

  // Item of four elements: tile, row 2 q + p, half of 64 elements, and which half of the lane's 8.
  __device__ __forceinline__ static int tile_of(int item) { return item / (4 * Shape::kValueVectors); }
  __device__ __forceinline__ static int row_of(int item) { return item / (2 * Shape::kValueVectors) % 2; }
  __device__ __forceinline__ static int element_of(int item) {
    return item / 2 % Shape::kValueVectors * 64 + int(threadIdx.x) % kWarp / 4 * 8 + item % 2 * 4;
  }
  __device__ __forceinline__ float4 item(int i) const {
    const int t = tile_of(i), p = row_of(i), n = i % (2 * Shape::kValueVectors) * 2;
    return make_float4(out[t][n][p], out[t][n][p + 2], out[t][n + 1][p], out[t][n + 1][p + 2]);
  }
};

// Products of one tile's queries with 32 slots -> scores in powers of two, -inf where a row may not see the slot; the largest of
// this lane's and of `most`.
template <class Shape>
__device__ __forceinline__ void score(const ScoreRule& rule, int first_slot, const int (&limit)[2], int t,
                                      float (&scores)[2][Shape::kTiles][4], float (&most)[2]) {
  const int row = threadIdx.x % kWarp / 4;
#pragma unroll
  for (int g = 0; g < 2; ++g)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[g][t][e] = __fmul_rn(scores[g][t][e], rule.inner);
  if (rule.capped)
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[g][t][e] = __fmul_rn(tanhf(scores[g][t][e]), rule.outer);
#pragma unroll
  for (int g = 0; g < 2; ++g)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& value = scores[g][t][e];
      const int slot = first_slot + g * 16 + e / 2 * 8 + row, last = limit[e % 2];
      value = slot <= last && (rule.window == 0 || slot > last - rule.window) ? value : -CUDART_INF_F;
      most[e % 2] = fmaxf(most[e % 2], value);
    }
}

// Scores -> weights, packed for the values; the state comes to the new maximum.
template <class Shape>
__device__ __forceinline__ void weigh(const ScoreRule& rule, int first_slot, const int (&limit)[2], int t,
                                      float (&scores)[2][Shape::kTiles][4], Attended<Shape>& state,
                                      uint32_t (&weights)[2][Shape::kTiles][2]) {
  float most[2] = {state.largest[t][0], state.largest[t][1]}, factor[2], sum[2] = {0.f, 0.f};
  score<Shape>(rule, first_slot, limit, t, scores, most);
#pragma unroll
  for (int p = 0; p < 2; ++p) {
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) most[p] = fmaxf(most[p], __shfl_xor_sync(kAllLanes, most[p], step));
    factor[p] = weight_of(state.largest[t][p], most[p]);
    state.largest[t][p] = most[p];
  }
#pragma unroll
  for (int g = 0; g < 2; ++g)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = narrowed(weight_of(scores[g][t][2 * half], most[0]), weight_of(scores[g][t][2 * half + 1], most[1]));
      const float2 taken = widened(pair);  // what the values are multiplied with
      sum[0] = __fadd_rn(sum[0], taken.x);
      sum[1] = __fadd_rn(sum[1], taken.y);
      weights[g][t][half] = transposed(pair);
    }
#pragma unroll
  for (int p = 0; p < 2; ++p) state.sum[t][p] = fmaf(state.sum[t][p], factor[p], sum[p]);
#pragma unroll
  for (int n = 0; n < Shape::kDim / 16; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) state.out[t][n][e] = __fmul_rn(state.out[t][n][e], factor[e % 2]);
}

// All keys and values of a span in registers: one wait for all of them.
template <class Shape>
struct Span {
  Keys<Shape> keys[2];
  Values<Shape> values[2];

  template <bool kInside>
  __device__ __forceinline__ void load_all(const Lanes& lanes, int first) {
#pragma unroll
    for (int g = 0; g < 2; ++g) keys[g].template load<kInside>(lanes, first + g * 16);
#pragma unroll
    for (int g = 0; g < 2; ++g) values[g].template load<kInside>(lanes, first + g * 16);
  }

  __device__ __forceinline__ void load(const Lanes& lanes, int first) {
    if (first + kSpan <= lanes.slots)
      load_all<true>(lanes, first);
    else
      load_all<false>(lanes, first);
  }

  // end: slots from there on are not written yet.
  __device__ __forceinline__ void attend(const Lanes&, int first, int end, const ScoreRule& rule, const Queries<Shape>& queries,
                                         Attended<Shape>& state) {
    float scores[2][Shape::kTiles][4];
    uint32_t weights[2][Shape::kTiles][2];
#pragma unroll
    for (int g = 0; g < 2; ++g) keys[g].multiply(queries, scores[g]);
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) weigh<Shape>(rule, first, queries.limit[t], t, scores, state, weights);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      if (first + kSpan > end) values[g].cut(first + g * 16, end);
      values[g].multiply(weights[g], state.out);
    }
  }
};

// The same where registers are dear: what is next is loaded while the other is used.
template <class Shape>
struct SpanInParts {
  __device__ __forceinline__ void load(const Lanes&, int) {}

  __device__ __forceinline__ void attend(const Lanes& lanes, int first, int end, const ScoreRule& rule,
                                         const Queries<Shape>& queries, Attended<Shape>& state) {
    float scores[2][Shape::kTiles][4];
    uint32_t weights[2][Shape::kTiles][2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      Keys<Shape> keys;
      keys.template load<false>(lanes, first + g * 16);
      keys.multiply(queries, scores[g]);
    }
    Values<Shape> values;
    values.template load<false>(lanes, first);
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t) weigh<Shape>(rule, first, queries.limit[t], t, scores, state, weights);
    if (first + kSpan > end) values.cut(first, end);
    values.multiply(weights[0], state.out);
    values.template load<false>(lanes, first + 16);
    if (first + kSpan > end) values.cut(first + 16, end);
    values.multiply(weights[1], state.out);
  }
};

}  // namespace mlspec
