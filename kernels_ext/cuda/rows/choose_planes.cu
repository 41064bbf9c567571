// How does a router choose, in one kernel and without the host, how many planes a block reads? A mean over a prompt, or one moved
// towards a token, times a small MLP; the largest score wins, the narrower of equal ones.
//
// A block has 256 columns: of a prompt those of a share of its tokens. The last block to arrive of those with the same columns adds
// their sums and multiplies them by the first layer; the last of all columns finishes. Sums are added in one order, whoever is last.
#include "choose_planes.h"

#include "row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kColumns = 256, kWarps = kColumns / kWarp, kTokensOfBlock = 64, kMostShares = 64, kMostHidden = 256, kMostCandidates = 8;

int groups_of(int64_t width) { return int((width + kColumns - 1) / kColumns); }

int64_t tokens_of_share(int64_t n) {
  const int64_t least = (n + kMostShares - 1) / kMostShares;
  return least > kTokensOfBlock ? least : kTokensOfBlock;
}

int shares_of(int64_t n) { return int((n + tokens_of_share(n) - 1) / tokens_of_share(n)); }

// Whether this block is the last of `count` to come here; what the others wrote before is then seen by all of its threads.
__device__ bool is_last(int32_t* arrived, int count) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1) == count - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// The first layer over this block's columns, of one token or of the prompt: dots [hidden].
__device__ void dot_columns(const mlspec_cuda_choose_planes& a, const float* features, int group, float* dots) {
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  for (int unit = warp; unit < a.hidden; unit += kWarps) {
    const float* row = a.inner + int64_t(unit) * a.width;
    float sum = 0;
#pragma unroll
    for (int i = lane; i < kColumns; i += kWarp) {
      const int64_t column = int64_t(group) * kColumns + i;
      if (column < a.width) sum = fmaf(row[column], features[i], sum);
    }
#pragma unroll
    for (int step = kWarp / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) dots[unit] = sum;
  }
}

// What the dots of all groups, [groups, hidden], choose.
__device__ void choose(const mlspec_cuda_choose_planes& a, const float* dots, int groups, int32_t* to) {
  __shared__ float inner[kMostHidden], scores[kMostCandidates];
  for (int unit = int(threadIdx.x); unit < a.hidden; unit += kColumns) {
    float sum = a.inner_bias[unit];
    for (int group = 0; group < groups; ++group) sum += __ldcg(dots + int64_t(group) * a.hidden + unit);
    inner[unit] = sum / (1.0f + expf(-sum));
  }
  __syncthreads();
  if (int(threadIdx.x) < a.num_candidates) {
    float sum = a.outer_bias[threadIdx.x];
    for (int unit = 0; unit < a.hidden; ++unit) sum = fmaf(a.outer[threadIdx.x * a.hidden + unit], inner[unit], sum);
    scores[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x) return;
  int best = 0;
  bool fails = false;
  for (int i = 0; i < a.num_candidates; ++i) {
    fails |= !isfinite(scores[i]);
    if (scores[i] > scores[best]) best = i;
  }
  if (fails) *a.failed = 1;
  *to = a.candidates[fails ? a.num_candidates - 1 : best];
}

// Grid: groups of columns x shares of the tokens. partial: sums [shares, width], then dots [groups, hidden].
__global__ void __launch_bounds__(kColumns) choose_of_prompt(const mlspec_cuda_choose_planes a, int64_t tokens) {
  __shared__ float features[kColumns];
  const int group = int(blockIdx.x), groups = int(gridDim.x), shares = int(gridDim.y);
  const int64_t column = int64_t(group) * kColumns + threadIdx.x;
  wait_for_previous_kernel();
  const int64_t first = blockIdx.y * tokens, end = first + tokens < a.n ? first + tokens : a.n;
  float sum = 0;
  if (column < a.width) {
    const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(a.x) + column;
#pragma unroll 8
    for (int64_t token = first; token < end; ++token) sum += __bfloat162float(x[token * a.width]);
    __stcg(a.partial + blockIdx.y * a.width + column, sum);
  }
  if (!is_last(a.arrived + 1 + group, shares)) return;
  sum = 0;
  if (column < a.width) {
    for (int share = 0; share < shares; ++share) sum += __ldcg(a.partial + share * a.width + column);
    sum /= float(a.n);
    a.means[column] = sum;
  }
  features[threadIdx.x] = sum;
  __syncthreads();
  float* const dots = a.partial + shares * a.width;
  dot_columns(a, features, group, dots + int64_t(group) * a.hidden);
  if (is_last(a.arrived, groups)) choose(a, dots, groups, a.widths);
}

// Grid: groups of columns x tokens. partial: dots [tokens, groups, hidden].
__global__ void __launch_bounds__(kColumns) choose_of_steps(const mlspec_cuda_choose_planes a) {
  __shared__ float features[kColumns];
  const int group = int(blockIdx.x), groups = int(gridDim.x);
  const int64_t token = blockIdx.y, each = a.n / a.batch, row = token / each;
  const int64_t column = int64_t(group) * kColumns + threadIdx.x;
  wait_for_previous_kernel();
  if (a.starts[row] + token % each < a.lengths[row]) {
    if (group == 0 && threadIdx.x == 0) a.widths[token] = a.known[row];
    return;
  }
  float feature = 0;
  if (column < a.width) {
    const float own = __bfloat162float(static_cast<const __nv_bfloat16*>(a.x)[token * a.width + column]);
    const float mean = a.means[row * a.width + column];
    feature = fmaf(a.share, own - mean, mean);
  }
  features[threadIdx.x] = feature;
  __syncthreads();
  float* const dots = a.partial + token * groups * a.hidden;
  dot_columns(a, features, group, dots + int64_t(group) * a.hidden);
  if (is_last(a.arrived + token, groups)) choose(a, dots, groups, a.widths + token);
}

}  // namespace
}  // namespace mlspec

extern "C" int64_t mlspec_cuda_choose_planes_groups(const mlspec_cuda_choose_planes* args) { return mlspec::groups_of(args->width); }

extern "C" int64_t mlspec_cuda_choose_planes_room(const mlspec_cuda_choose_planes* args) {
  const int64_t dots = int64_t(mlspec::groups_of(args->width)) * args->hidden;
  return args->starts ? args->n * dots : mlspec::shares_of(args->n) * args->width + dots;
}

extern "C" const char* mlspec_cuda_choose_widths(const mlspec_cuda_choose_planes* args, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  if (args->hidden < 1 || args->hidden > kMostHidden) return "a router has 1 to 256 hidden units";
  if (args->num_candidates < 1 || args->num_candidates > kMostCandidates) return "a router chooses among 1 to 8 widths";
  const unsigned groups = unsigned(groups_of(args->width));
  if (args->starts) {
    if (args->n > 65535) return "a step has at most 65535 tokens";
    return launch_rows(*how, {dim3(groups, unsigned(args->n)), kColumns}, choose_of_steps, *args);
  }
  return launch_rows(*how, {dim3(groups, unsigned(shares_of(args->n))), kColumns}, choose_of_prompt, *args, tokens_of_share(args->n));
}
