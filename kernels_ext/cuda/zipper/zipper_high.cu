// How does a GPU add the sparse high part of a weight to the sums of its low part? A warp takes an output: each lane its terms j, j + 32,
// and so on, then lanes are added in a tree. A token's sums are made in this order however many others there are.
#include "../rows/row_launch.cuh"
#include "zipper_high.h"

namespace mlspec {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarp, kInFlight = 4;  // terms of a lane that are loaded together

// Which of a group's four inputs a term adds, as masks of two pairs of bfloat16, and how often.
struct Term {
  uint32_t first, second;
  float times;
  __device__ __forceinline__ explicit Term(int32_t term) {
    first = (term & 1 ? 0xFFFFu : 0u) | (term & 2 ? 0xFFFF0000u : 0u);
    second = (term & 4 ? 0xFFFFu : 0u) | (term & 8 ? 0xFFFF0000u : 0u);
    times = __uint_as_float(uint32_t(term) >> 11 << 31 | ((uint32_t(term) >> 8 & 7) + 127) << 23);
  }
  __device__ __forceinline__ void add(float& sum, uint2 group) const {
    const float2 a = widened(group.x & first), b = widened(group.y & second);
    sum = __fmaf_rn(times, __fadd_rn(__fadd_rn(a.x, a.y), __fadd_rn(b.x, b.y)), sum);
  }
};

__device__ __forceinline__ const mlspec_cuda_zipper_rows& segment_of(const mlspec_cuda_zipper_high& p, int64_t output) {
  int found = 0;
#pragma unroll
  for (int i = 1; i < MLSPEC_CUDA_ZIPPER_SEGMENTS; ++i)
    if (i < p.num_segments && output >= p.segments[i].first_output) found = i;
  return p.segments[found];
}

// The sums of one output and kTokens tokens, the same in every lane. x: groups of four, of kTokens rows or as many as there are.
template <int kTokens>
__device__ __forceinline__ void add_terms(float (&sums)[kTokens], const mlspec_cuda_zipper_rows& rows, int64_t output, const uint2* x,
                                          int groups, int tokens, int lane) {
  const int begin = rows.starts[output], end = rows.starts[output + 1];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) sums[t] = 0.f;
  for (int j = begin + lane; j < end; j += kWarp * kInFlight) {
    int32_t loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) loaded[i] = j + i * kWarp < end ? rows.terms[j + i * kWarp] : -1;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (loaded[i] < 0) break;
      const Term term(loaded[i]);
      const uint2* group = x + (loaded[i] >> 12);
#pragma unroll
      for (int t = 0; t < kTokens; ++t)
        if (t < tokens) term.add(sums[t], group[t * groups]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) sums[t] = warp_sum(sums[t]);
}

__device__ __forceinline__ void store_sum(const mlspec_cuda_zipper_high& p, int64_t token, int64_t output, float sum, float step) {
  const int64_t place = token * p.out_features + output;
  float value = __fmaf_rn(step, sum, p.low[place]);
  if (p.bias)
    value = __fadd_rn(value, p.bias_is_float32 ? static_cast<const float*>(p.bias)[output]
                                               : __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[output]));
  if (p.y_is_float32) static_cast<float*>(p.y)[place] = value;
  else static_cast<__nv_bfloat16*>(p.y)[place] = __float2bfloat16_rn(value);
}

// Blocks along y: kTokens tokens; along x: they share the outputs. kShared: the tokens are copied to shared memory first.
template <int kTokens, bool kShared>
__global__ void __launch_bounds__(kThreads) high_kernel(const __grid_constant__ mlspec_cuda_zipper_high p) {
  extern __shared__ __align__(16) uint8_t shared[];
  launch_dependents();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kWarp, groups = int(p.in_features / 4);
  const int64_t first = int64_t(blockIdx.y) * kTokens;
  const int tokens = int(min(int64_t(kTokens), p.num_tokens - first));
  const uint2* x = static_cast<const uint2*>(p.x) + first * groups;
  if constexpr (kShared) {
    uint2* own = reinterpret_cast<uint2*>(shared);
    for (int i = threadIdx.x; i < tokens * groups; i += kThreads) own[i] = x[i];
    __syncthreads();
    x = own;
  }
  for (int64_t output = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; output < p.out_features;
       output += int64_t(gridDim.x) * kWarps) {
    const mlspec_cuda_zipper_rows& rows = segment_of(p, output);
    const int64_t local = output - rows.first_output;
    float sums[kTokens];
    add_terms<kTokens>(sums, rows, local, x, groups, tokens, lane);
    const float step = rows.step[local];
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
      if (lane == t && t < tokens) store_sum(p, first + t, output, sums[t], step);
  }
}

// As many blocks as run at once, and no more than there are outputs for.
template <int kTokens, bool kShared>
const char* launch_tokens(const mlspec_cuda_zipper_high& p, const mlspec_cuda_row_launch& how) {
  const int64_t bytes = kShared ? kTokens * p.in_features * 2 : 0;
  const int64_t fit = bytes > 0 ? p.shared_bytes / bytes : 4, at_once = p.multiprocessors * (fit < 1 ? 1 : fit < 4 ? fit : 4);
  const unsigned wanted = blocks_for(p.out_features, kWarps), pieces = blocks_for(p.num_tokens, kTokens);
  if (pieces > 65535) return "too many tokens for one launch: call it for fewer tokens";
  const unsigned blocks = wanted < at_once ? wanted : unsigned(at_once);
  return launch_rows(how, RowGrid{dim3(blocks, pieces), kThreads, unsigned(bytes)}, high_kernel<kTokens, kShared>, p);
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_zipper_high_linear(const mlspec_cuda_zipper_high* high, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  const int64_t row = high->in_features * 2, fit = row > 0 ? high->shared_bytes / row : 0;
  if (high->num_tokens < 1 || high->out_features < 1 || high->in_features < 4 || high->in_features % 4)
    return "the sparse high part takes 1 token or more, 1 output or more and inputs in groups of 4";
  if (high->num_segments < 1 || high->num_segments > MLSPEC_CUDA_ZIPPER_SEGMENTS) return "the high part is of 1 to 3 weights";
  if (fit < 1) return launch_tokens<1, false>(*high, *how);
  if (high->num_tokens > 4 && fit >= 8) return launch_tokens<8, true>(*high, *how);
  if (high->num_tokens > 2 && fit >= 4) return launch_tokens<4, true>(*high, *how);
  if (high->num_tokens > 1 && fit >= 2) return launch_tokens<2, true>(*high, *how);
  return launch_tokens<1, true>(*high, *how);
}
