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

__device__ __forceinline__ void store_outputs(const LinearParams& p, float4 sum, float out_scale, int token, int output) {
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  __nv_bfloat16* out = p.out + size_t(token) * p.out_features + output;
  __nv_bfloat16 rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value = __fmul_rn(values[i], out_scale);
    if (p.bias && output + i < p.out_features) value = __fadd_rn(value, bias_of(p, output + i));
    rounded[i] = __float2bfloat16_rn(value);
  }
  if (p.out_features % 4 == 0 && output < p.out_features) {
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(rounded);
  } else {
    for (int i = 0; i < 4; ++i)
      if (output + i < p.out_features) out[i] = rounded[i];
  }
}

// Sums of the blocks of the cluster, by rank; each block finishes its share of the outputs.
template <class V>
__device__ __forceinline__ void add_ranks(const LinearParams& p, const float* total, float out_scale, int first_token,
                                          int first_output) {
  const int ranks = cluster_size(), rank = cluster_rank();
  const int tokens = min(V::kTokens, p.num_tokens - first_token);
  constexpr int kQuads = V::kOutputs / 4;
  if (ranks > 1) cluster_sync();
  for (int i = rank * V::kConsumers + threadIdx.x; i < tokens * kQuads; i += ranks * V::kConsumers) {
    const int token = i / kQuads, row = i % kQuads * 4;
    const float* place = total + token * V::kSumStride + row;
    float4 sum = {0, 0, 0, 0};
    if (ranks == 1) sum = *reinterpret_cast<const float4*>(place);
    for (int other = 0; ranks > 1 && other < ranks; ++other) {
      const float4 part = load_cluster(shared_address(place), other);
      sum.x = __fadd_rn(sum.x, part.x), sum.y = __fadd_rn(sum.y, part.y);
      sum.z = __fadd_rn(sum.z, part.z), sum.w = __fadd_rn(sum.w, part.w);
    }
    store_outputs(p, sum, out_scale, first_token + token, first_output + row);
  }
  if (ranks > 1) cluster_exit();  // the others may still read this block's memory
}

}  // namespace mlspec
