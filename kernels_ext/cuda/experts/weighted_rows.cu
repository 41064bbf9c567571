// How do the outputs of a token's experts become one? Added in float32 in the order of its choice, the shared one last.
#include "../rows/row_launch.cuh"
#include "experts.h"

namespace mlspec {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void add_row(float (&sums)[kVector], const __nv_bfloat16* row, float weight) {
  float v[kVector];
  load_vector(row, v);
#pragma unroll
  for (int j = 0; j < kVector; ++j) sums[j] = __fmaf_rn(weight, v[j], sums[j]);
}

__global__ void __launch_bounds__(kThreads) weighted_kernel(const __grid_constant__ mlspec_cuda_weighted p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t across = p.width / kVector, i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_tokens * across) return;
  const int64_t token = i / across, place = i % across * kVector;
  const float* weights = p.weights + token * p.weights_of_token;
  const __nv_bfloat16* rows = static_cast<const __nv_bfloat16*>(p.rows) + token * p.chosen * p.width + place;
  float sums[kVector] = {};
#pragma unroll 4
  for (int rank = 0; rank < p.chosen; ++rank) add_row(sums, rows + rank * p.width, weights[rank]);
  const float own = p.weights_of_token > p.chosen ? weights[p.chosen] : 1.f;
  if (p.shared) add_row(sums, static_cast<const __nv_bfloat16*>(p.shared) + token * p.width + place, own);
  store_vector(static_cast<__nv_bfloat16*>(p.y) + token * p.width + place, sums);
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_weighted_rows(const mlspec_cuda_weighted* args, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  if (args->num_tokens < 1 || args->width < 1 || args->width % kVector || args->chosen < 1 ||
      args->weights_of_token < args->chosen)
    return "weighted rows are one or more a token, of a multiple of 8 elements";
  const int64_t vectors = args->num_tokens * (args->width / kVector);
  if (vectors > int64_t(INT32_MAX)) return "too many tokens for one launch: call it for fewer tokens";
  return launch_rows(*how, RowGrid{dim3(blocks_for(vectors, kThreads)), kThreads}, weighted_kernel, *args);
}
