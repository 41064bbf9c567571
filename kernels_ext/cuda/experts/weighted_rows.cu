// How do the outputs of a token's experts become one? Added in float32 in the order of its choice, the shared one last; what the
// residual stream becomes of it, and its norm, in the same kernel.
#include "../rows/row_launch.cuh"
#include "experts.h"

namespace mlspec {
namespace {

constexpr int kThreads = 256, kNormThreads = 512, kNormVectors = 4;  // of a row that is normed: up to 16384 elements

__device__ __forceinline__ void add_row(float (&sums)[kVector], const __nv_bfloat16* row, float weight) {
  float v[kVector];
  load_vector(row, v);
#pragma unroll
  for (int j = 0; j < kVector; ++j) sums[j] = __fmaf_rn(weight, v[j], sums[j]);
}

// kVector elements of a token from `place` on.
__device__ __forceinline__ void sum_rows(const mlspec_cuda_weighted& p, int64_t token, int64_t place, float (&sums)[kVector]) {
  const float* weights = p.weights + token * p.weights_of_token;
  const __nv_bfloat16* rows = static_cast<const __nv_bfloat16*>(p.rows) + token * p.chosen * p.width + place;
#pragma unroll
  for (int j = 0; j < kVector; ++j) sums[j] = 0.f;
#pragma unroll 8
  for (int rank = 0; rank < p.chosen; ++rank) add_row(sums, rows + rank * p.width, weights[rank]);
  const float own = p.weights_of_token > p.chosen ? weights[p.chosen] : 1.f;
  if (p.shared) add_row(sums, static_cast<const __nv_bfloat16*>(p.shared) + token * p.width + place, own);
}

__global__ void __launch_bounds__(kThreads) weighted_kernel(const __grid_constant__ mlspec_cuda_weighted p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t across = p.width / kVector, i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_tokens * across) return;
  const int64_t token = i / across, place = i % across * kVector;
  float sums[kVector];
  sum_rows(p, token, place, sums);
  store_vector(static_cast<__nv_bfloat16*>(p.y) + token * p.width + place, sums);
}

// One block a token, whose threads have the elements that those of rms_norm_kernel (rows/row_ops.cu) have: the same bits.
template <class Weight, int kVectors>
__global__ void __launch_bounds__(kNormThreads)
    weighted_norm_kernel(const __grid_constant__ mlspec_cuda_weighted p, const __grid_constant__ mlspec_cuda_weighted_norm norm) {
  __shared__ float totals[kWarp];
  launch_dependents();
  const int64_t token = blockIdx.x, first = token * p.width;
  const Weight* weight = static_cast<const Weight*>(norm.weight);
  float scale[kVectors][kVector], row[kVectors][kVector], squares = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = int64_t(threadIdx.x + i * blockDim.x) * kVector;
    if (at < p.width) load_vector(weight + at, scale[i]);
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = int64_t(threadIdx.x + i * blockDim.x) * kVector;
    if (at >= p.width) continue;
    float other[kVector];
    sum_rows(p, token, at, row[i]);
    load_vector(static_cast<const __nv_bfloat16*>(norm.residual) + first + at, other);
#pragma unroll
    for (int e = 0; e < kVector; ++e) row[i][e] = rounded(rounded(row[i][e]) + other[e]);
    store_vector(static_cast<__nv_bfloat16*>(norm.total) + first + at, row[i]);
#pragma unroll
    for (int e = 0; e < kVector; ++e) squares = fmaf(row[i][e], row[i][e], squares);
  }
  const float inverse = rsqrtf(block_sum(squares, totals) / float(p.width) + norm.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = int64_t(threadIdx.x + i * blockDim.x) * kVector;
    if (at >= p.width) continue;
#pragma unroll
    for (int e = 0; e < kVector; ++e) row[i][e] = row[i][e] * inverse * scale[i][e];
    store_vector(static_cast<__nv_bfloat16*>(norm.normed) + first + at, row[i]);
  }
}

const char* problem_of(const mlspec_cuda_weighted& p) {
  if (p.num_tokens < 1 || p.width < 1 || p.width % kVector || p.chosen < 1 || p.weights_of_token < p.chosen)
    return "weighted rows are one or more a token, of a multiple of 8 elements";
  return p.num_tokens * (p.width / kVector) > INT32_MAX ? "too many tokens for one launch: call it for fewer tokens" : nullptr;
}

template <class Weight>
const char* launch_norm(const mlspec_cuda_weighted& p, const mlspec_cuda_weighted_norm& norm, const mlspec_cuda_row_launch& how) {
  const unsigned vectors = unsigned(p.width / kVector), whole = (vectors + kWarp - 1) / kWarp * kWarp;
  const RowGrid grid{dim3(unsigned(p.num_tokens)), whole < kNormThreads ? whole : kNormThreads};
  const unsigned share = (vectors + grid.threads - 1) / grid.threads;
  if (share > kNormVectors) return "rows of weighted experts that are normed have up to 16384 elements";
  if (share == 1) return launch_rows(how, grid, weighted_norm_kernel<Weight, 1>, p, norm);
  if (share == 2) return launch_rows(how, grid, weighted_norm_kernel<Weight, 2>, p, norm);
  return launch_rows(how, grid, weighted_norm_kernel<Weight, kNormVectors>, p, norm);
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_weighted_rows(const mlspec_cuda_weighted* args, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  if (const char* problem = problem_of(*args)) return problem;
  const int64_t vectors = args->num_tokens * (args->width / kVector);
  return launch_rows(*how, RowGrid{dim3(blocks_for(vectors, kThreads)), kThreads}, weighted_kernel, *args);
}

extern "C" const char* mlspec_cuda_weighted_norm_rows(const mlspec_cuda_weighted* args, const mlspec_cuda_weighted_norm* norm,
                                                      const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  if (const char* problem = problem_of(*args)) return problem;
  return norm->weight_is_bf16 ? launch_norm<__nv_bfloat16>(*args, *norm, *how) : launch_norm<float>(*args, *norm, *how);
}
