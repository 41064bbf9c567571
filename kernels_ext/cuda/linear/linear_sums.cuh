// How do the sums of a block's groups of warps, and of the blocks of a cluster, become outputs, always in the same order?
#pragma once

#include "linear_ring.cuh"

namespace mlspec {

// The block's sums to shared memory: [token, output], group 0 + group 1.
template <class V>
__device__ __forceinline__ void add_groups(const float (&sums)[V::kTokenTiles][4], float* total, int warp, int lane) {
  for (int group = V::kWarpGroups - 1; group >= 0; --group) {
    if (warp / (4 * V::kTiles) == group) {
      const int first_row = warp % (4 * V::kTiles) * 16 + lane / 4;
#pragma unroll
      for (int t = 0; t < V::kTokenTiles; ++t) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& place = total[(t * 8 + lane % 4 * 2 + c % 2) * V::kSumStride + first_row + c / 2 * 8];
          place = group == V::kWarpGroups - 1 ? sums[t][c] : __fadd_rn(sums[t][c], place);
        }
      }
    }
    barrier_sync<V::kConsumers>();
  }
}

__device__ __forceinline__ float bias_of(const LinearParams& p, int output) {
  if (p.bias_is_float32) return static_cast<const float*>(p.bias)[output];
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[output]);
}

// What adapters add to four rounded outputs of a token: every product and sum as in rows/low_rank.cu.
__device__ __forceinline__ void add_low_rank(const LinearParams& p, __nv_bfloat16 (&rounded)[4], int token, int output) {
  const float* between = p.between + size_t(token) * p.low_ranks;
  int at[4], first[4];
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    at[i] = min(output + i, p.out_features - 1);
    first[i] = min(p.first[at[i]], p.low_ranks - 1);
  }
#pragma unroll 8
  for (int j = 0; j < p.low_rank; ++j) {
    const float* up = p.up + size_t(j) * p.out_features;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = fmaf(up[at[i]], between[min(max(first[i] + j, 0), p.low_ranks - 1)], sum[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) rounded[i] = __float2bfloat16_rn(__fadd_rn(__bfloat162float(rounded[i]), sum[i]));
}

template <bool kAdapted = false>
__device__ __forceinline__ void store_outputs(const LinearParams& p, float4 sum, float out_scale, int token, int output) {
  if (p.widths && p.widths[token] != p.width) return;
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
  const size_t place = size_t(token) * p.out_features + output;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + place;
  __nv_bfloat16 rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = __fmul_rn(values[i], out_scale);
    if (p.bias && output + i < p.out_features) values[i] = __fadd_rn(values[i], bias_of(p, output + i));
    rounded[i] = __float2bfloat16_rn(values[i]);
  }
  if constexpr (kAdapted) add_low_rank(p, rounded, token, output);
  if (p.out_is_float32) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (output + i < p.out_features) static_cast<float*>(p.out)[place + i] = values[i];
  } else if (p.out_features % 4 == 0 && output < p.out_features) {
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(rounded);
  } else {
    for (int i = 0; i < 4; ++i)
      if (output + i < p.out_features) out[i] = rounded[i];
  }
}

// Where the results of one unit go.
struct Outputs {
  int tokens, first_token, first_output;
  float scale;
};

template <class V>
__device__ __forceinline__ const float* place_of_quad(const float* total, int i) {
  return total + i / (V::kOutputs / 4) * V::kSumStride + i % (V::kOutputs / 4) * 4;
}

template <class V>
__device__ __forceinline__ void store_quad(const LinearParams& p, const Outputs& to, int i, float4 sum) {
  constexpr int kQuadsOfToken = V::kOutputs / 4;
  store_outputs<V::kAdapted>(p, sum, to.scale, to.first_token + i / kQuadsOfToken, to.first_output + i % kQuadsOfToken * 4);
}

__device__ __forceinline__ void add(float4& sum, float4 part) {
  sum.x = __fadd_rn(sum.x, part.x), sum.y = __fadd_rn(sum.y, part.y);
  sum.z = __fadd_rn(sum.z, part.z), sum.w = __fadd_rn(sum.w, part.w);
}

// Bytes that the other blocks of the cluster will send this one.
template <class V>
__device__ __forceinline__ int bytes_of_others(int tokens, int ranks, int rank) {
  int quads = 0;
#pragma unroll 1
  for (int first = rank * V::kConsumers; first < tokens * V::kOutputs / 4; first += ranks * V::kConsumers)
    quads += min(V::kConsumers, tokens * V::kOutputs / 4 - first);
  return (ranks - 1) * quads * 16;
}

// Few tokens: each block sends its sums to the blocks that finish them, and leaves.
template <class V>
__device__ __forceinline__ void send_to_ranks(const LinearParams& p, Ring ring, const float* total, int rank, const Outputs& to) {
  const int ranks = p.ranks, quads = to.tokens * V::kOutputs / 4;
  if (threadIdx.x == 0) barrier_arrive_expect(ring.others(), bytes_of_others<V>(to.tokens, ranks, rank));
  const float4* others = reinterpret_cast<const float4*>(total + V::kTokens * V::kSumStride);  // [rank but this one, quad]
  const int quads_of_rank = V::quads_of_rank(ranks);
  cluster_has_begun();
#pragma unroll 1
  for (int owner = 0; owner < ranks; ++owner) {
    if (owner == rank) continue;
    const float4* place = others + (rank - (rank > owner)) * quads_of_rank + threadIdx.x;
#pragma unroll 1
    for (int i = owner * V::kConsumers + threadIdx.x; i < quads; i += ranks * V::kConsumers, place += V::kConsumers)
      store_cluster(shared_address(place), ring.others(), owner,
                    *reinterpret_cast<const float4*>(place_of_quad<V>(total, i)));
  }
  barrier_wait(ring.others(), 0);
  const float4* place = others + threadIdx.x;
#pragma unroll 1
  for (int i = rank * V::kConsumers + threadIdx.x; i < quads; i += ranks * V::kConsumers, place += V::kConsumers) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll 1
    for (int from = 0; from < ranks; ++from)
      add(sum, from == rank ? *reinterpret_cast<const float4*>(place_of_quad<V>(total, i))
                            : place[(from - (from > rank)) * quads_of_rank]);
    store_quad<V>(p, to, i, sum);
  }
}

// Many tokens: each block reads the sums of its share of the outputs from all others.
template <class V>
__device__ __forceinline__ void read_from_ranks(const LinearParams& p, const float* total, int rank, const Outputs& to) {
  const int ranks = p.ranks;
  cluster_sync();
  for (int i = rank * V::kConsumers + threadIdx.x; i < to.tokens * V::kOutputs / 4; i += ranks * V::kConsumers) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll 1
    for (int from = 0; from < ranks; ++from) add(sum, load_cluster(shared_address(place_of_quad<V>(total, i)), from));
    store_quad<V>(p, to, i, sum);
  }
  cluster_exit();  // the others may still read this block's memory
}

// Sums of the blocks of the cluster, by rank; each block finishes its share of the outputs.
template <class V>
__device__ __forceinline__ void add_ranks(const LinearParams& p, Ring ring, const float* total, int rank, const Outputs& to) {
  if (p.ranks > 1) {
    if constexpr (V::kOwnSums) send_to_ranks<V>(p, ring, total, rank, to);
    else read_from_ranks<V>(p, total, rank, to);
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < to.tokens * V::kOutputs / 4; i += V::kConsumers)
    store_quad<V>(p, to, i, *reinterpret_cast<const float4*>(place_of_quad<V>(total, i)));
}

}  // namespace mlspec
