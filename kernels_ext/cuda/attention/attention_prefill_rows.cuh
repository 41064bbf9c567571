// How do the queries of attention_prefill.cu come, what does a thread have of its rows, how do products become weights, and ranks and
// teams one?
#pragma once

#include "attention_codes.cuh"

namespace mlspec {

constexpr int kPrefillRows = 128;  // of a block

// What a thread has of rows lane / 4 and 8 behind it, of its warp's 16.
template <class Shape>
struct GroupState {
  // Sums: of slots as the warps of attention.cu share them. shift: of int4 codes, weights times zeros.
  float largest[2], sum[2][kAttendWarps], shift[2][Shape::kBits == 4 ? kAttendWarps : 1], out[Shape::kOutTiles][4];

  __device__ __forceinline__ void clear_numbers() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = -CUDART_INF_F;
#pragma unroll
      for (int w = 0; w < kAttendWarps; ++w) {
        sum[r][w] = 0.f;
        if constexpr (Shape::kBits == 4) shift[r][w] = 0.f;
      }
    }
  }
  __device__ __forceinline__ static float whole(const float (&parts)[kAttendWarps]) {
    float whole = sum_of_lanes(parts[0]);
#pragma unroll
    for (int w = 1; w < kAttendWarps; ++w) whole = __fadd_rn(whole, sum_of_lanes(parts[w]));
    return whole;
  }
  __device__ __forceinline__ float whole_sum(int r) const { return whole(sum[r]); }
  __device__ __forceinline__ float whole_shift(int r) const {
    if constexpr (Shape::kBits == 4) return whole(shift[r]);
    return 0.f;
  }
  // What zeros add to a rank that has ended.
  __device__ __forceinline__ void add(const float (&shifts)[2]) {
    if constexpr (Shape::kBits == 4)
#pragma unroll
      for (int n = 0; n < Shape::kOutTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[n][e] = __fadd_rn(out[n][e], shifts[e / 2]);
  }
};

// The ranks of a team so far: maxima, sums and weighted sums of rows.
template <class Shape>
struct Team {
  float largest[2], sum[2], out[Shape::kOutTiles][4];
  bool empty;

  __device__ __forceinline__ void clear() {
    empty = true, largest[0] = largest[1] = -CUDART_INF_F, sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int n = 0; n < Shape::kOutTiles; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
  }
  // rank_largest, rank_sum: of the rank whose weighted sums stand in `rank`.
  __device__ __forceinline__ void add(const float (&rank)[Shape::kOutTiles][4], const float (&rank_largest)[2],
                                      const float (&rank_sum)[2]) {
    const Merge low(largest[0], rank_largest[0]), high(largest[1], rank_largest[1]);
    empty = false, largest[0] = low.largest, largest[1] = high.largest;
    sum[0] = low(sum[0], rank_sum[0]), sum[1] = high(sum[1], rank_sum[1]);
#pragma unroll
    for (int n = 0; n < Shape::kOutTiles; ++n) {
      out[n][0] = low(out[n][0], rank[n][0]), out[n][1] = low(out[n][1], rank[n][1]);
      out[n][2] = high(out[n][2], rank[n][2]), out[n][3] = high(out[n][3], rank[n][3]);
    }
  }
};

// The teams so far: the same, the weighted sums in shared memory.
template <class Shape>
struct Merged {
  float largest[2], sum[2];
  float4* out;  // [kOutTiles][128 threads]

  __device__ __forceinline__ void clear() {
    largest[0] = largest[1] = -CUDART_INF_F, sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int n = 0; n < Shape::kOutTiles; ++n) out[n * 128] = {0.f, 0.f, 0.f, 0.f};
  }
  // Of a team.
  __device__ __forceinline__ void add(const float (&team)[Shape::kOutTiles][4], const float (&team_largest)[2],
                                      const float (&team_sum)[2]) {
    const Merge low(largest[0], team_largest[0]), high(largest[1], team_largest[1]);
    largest[0] = low.largest, largest[1] = high.largest;
    sum[0] = low(sum[0], team_sum[0]), sum[1] = high(sum[1], team_sum[1]);
#pragma unroll
    for (int n = 0; n < Shape::kOutTiles; ++n) {
      float4 v = out[n * 128];
      v.x = low(v.x, team[n][0]), v.y = low(v.y, team[n][1]);
      v.z = high(v.z, team[n][2]), v.w = high(v.w, team[n][3]);
      out[n * 128] = v;
    }
  }
};

// A rank has ended, and its team where `ends`. A team of one rank is that rank.
template <class Shape>
__device__ __forceinline__ void end_rank(const float (&rank)[Shape::kOutTiles][4], const float (&largest)[2], const float (&sum)[2],
                                         bool ends, Team<Shape>& team, Merged<Shape>& merged) {
  if (ends && team.empty) return merged.add(rank, largest, sum);
  team.add(rank, largest, sum);
  if (!ends) return;
  merged.add(team.out, team.largest, team.sum);
  team.clear();
}

// -inf where a row may not see the slot.
__device__ __forceinline__ void hide(int first_slot, const int (&limit)[2], int window, float (&scores)[8][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int slot = first_slot + j * 8 + e % 2, last = limit[e / 2];
      const bool seen = slot <= last && (window == 0 || slot > last - window);
      scores[j][e] = seen ? scores[j][e] : -CUDART_INF_F;
    }
}

// Values of a group's rows and a chunk -> weights; factor: of what was attended so far.
template <class Shape>
__device__ __forceinline__ void weigh(float slope, float (&scores)[8][4], GroupState<Shape>& state, float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < 8; ++j) most = fmaxf(most, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    most = fmaxf(state.largest[r], __fmul_rn(most, slope));
    factor[r] = weight_of(state.largest[r], most);
    state.largest[r] = most;
    const float base = most == -CUDART_INF_F ? 0.f : -most;
    float sum[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float &low = scores[j][2 * r], &high = scores[j][2 * r + 1];
      low = exp2_approximate(fmaf(low, slope, base)), high = exp2_approximate(fmaf(high, slope, base));
      sum[j] = __fadd_rn(low, high);
    }
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w)
      state.sum[r][w] = fmaf(state.sum[r][w], factor[r], __fadd_rn(sum[2 * w], sum[2 * w + 1]));
  }
}

// Of a widened chunk, what belongs to the thread's slots; zeros: of int4 codes.
struct ChunkScales {
  const float *steps, *zeros;

  __device__ __forceinline__ static float2 two(const float* of, int j) { return *reinterpret_cast<const float2*>(of + j * 8); }
};

// Of keys that are widened codes. sums: of the queries.
template <class Shape>
__device__ __forceinline__ void scale_products(const ChunkScales& from, const float (&sums)[2], float (&scores)[8][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 steps = from.two(from.steps, j), zeros = Shape::kBits == 4 ? from.two(from.zeros, j) : float2{0.f, 0.f};
    const SlotScale scales[2] = {{steps.x, zeros.x}, {steps.y, zeros.y}};
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[j][e] = scaled_product<Shape::kBits>(scores[j][e], scales[e % 2], sums[e / 2]);
  }
}

// narrow_weights for values that are widened codes; of int4 codes also what their zeros add.
template <class Shape>
__device__ __forceinline__ void narrow_scaled_weights(const ChunkScales& from, const float (&scores)[8][4], const float (&factor)[2],
                                                      GroupState<Shape>& state, uint32_t (&weights)[16]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 steps = from.two(from.steps, j);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      weights[j * 2 + r] = narrowed(scaled_weight(scores[j][2 * r], steps.x), scaled_weight(scores[j][2 * r + 1], steps.y));
  }
  if constexpr (Shape::kBits == 4) {
#pragma unroll
    for (int w = 0; w < kAttendWarps; ++w) {
      const float2 first = from.two(from.zeros, 2 * w), second = from.two(from.zeros, 2 * w + 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float shift = shift_of(scores[2 * w][2 * r], scores[2 * w][2 * r + 1], first.x, first.y);
        const float further = shift_of(scores[2 * w + 1][2 * r], scores[2 * w + 1][2 * r + 1], second.x, second.y);
        state.shift[r][w] = fmaf(state.shift[r][w], factor[r], __fadd_rn(shift, further));
      }
    }
  }
}

// As operand A: weights of 16 slots are 4 registers.
__device__ __forceinline__ void narrow_weights(const float (&scores)[8][4], uint32_t (&weights)[16]) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) weights[j * 2 + r] = narrowed(scores[j][2 * r], scores[j][2 * r + 1]);
}

// Bytes to 8 elements of a query: rows of 128 bytes, 128-byte swizzle, of 64 elements of all rows one behind the other.
__device__ __forceinline__ uint32_t swizzled_place(int row, int vector) {
  return vector / 8 * kPrefillRows * 128 + row * 128 + ((vector % 8 ^ row % 8) << 4);
}

// Of the query rows of a group, to shared memory: rows of 128 bytes, 128-byte swizzle.
template <class Shape>
__device__ __forceinline__ void load_group_queries(const AttentionArgs& a, const Tile& tile, uint32_t queries, int group) {
  constexpr int kVectors = Shape::kDim / kVector;
  const int dim = int(a.cache.dim);
  for (int i = threadIdx.x % 128; i < 64 * kVectors; i += 128) {
    const int row = group * 64 + i / kVectors, vector = i % kVectors;
    const __nv_bfloat16* const query = query_of(a, tile, row);
    const bool inside = query && vector * kVector < dim;
    copy_async(queries + swizzled_place(row, vector), inside ? query + vector * kVector : a.q, inside);
  }
  wait_for_copies();
}

// The same in the order of the codes, and the sums of their elements.
template <class Shape>
__device__ __forceinline__ void load_ordered_group_queries(const AttentionArgs& a, const Tile& tile, uint32_t queries, float* sums,
                                                           int group) {
  constexpr int kFours = Shape::kDim / 4;
  const int dim = int(a.cache.dim);
  for (int i = threadIdx.x % 128; i < 64 * kFours; i += 128) {
    const int row = group * 64 + i / kFours, four = i % kFours, place = place_of(four, dim / 16);
    const __nv_bfloat16* const query = query_of(a, tile, row);
    const bool inside = query && four * 4 < dim;
    const uint2 words = ordered_four(inside ? *reinterpret_cast<const uint2*>(query + four * 4) : uint2{0, 0});
    store_shared(queries + swizzled_place(row, place / kVector) + place % kVector * 2, words.x);
    store_shared(queries + swizzled_place(row, place / kVector + 1) + place % kVector * 2, words.y);
  }
  if constexpr (Shape::kBits == 4) sum_queries(a, tile, group * 64, 64, threadIdx.x % 128 / kWarp, 4, sums);
}

}  // namespace mlspec
