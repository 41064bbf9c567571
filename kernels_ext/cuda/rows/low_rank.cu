// What do adapters add to the outputs of a linear? Two thin products in float32: inputs times down, to `between`, and that times up,
// which linear/linear_sums.cuh does in the same order where it can. A sum has one order, however many rows are computed together.
#include "row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kStep = kThreads * kVector;
constexpr int kUpThreads = 64;  // small blocks spread over the chip
constexpr int kFewRows = 8;     // up to which a block has one rank, so that more blocks read
constexpr int kUpHeld = 16;     // ranks that a thread reads together

// Lane l of warp w takes vectors w * 32 + l, and every 256th from there; then lanes in a tree, then warps in order. The first
// weights are read while the kernel before still runs: nobody writes them.
template <int kRanks, int kRows>
__global__ void __launch_bounds__(kThreads) low_rank_down_kernel(mlspec_cuda_low_rank_down p) {
  constexpr int kHeld = kRanks == 1 ? 4 : 1;
  __shared__ float sums[kWarps][kRanks * kRows];
  launch_dependents();
  const auto* x = static_cast<const __nv_bfloat16*>(p.x);
  const int64_t rank = int64_t(blockIdx.x) * kRanks, row = int64_t(blockIdx.y) * kRows;
  float sum[kRanks][kRows] = {}, down[kHeld][kRanks][kVector];
  const auto read = [&](int64_t at) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
#pragma unroll
      for (int i = 0; i < kRanks; ++i)
        if (at + h * kStep < p.in_features)
          load_vector(p.down + min(rank + i, p.ranks - 1) * p.in_features + at + h * kStep, down[h][i]);
  };
  int64_t at = int64_t(threadIdx.x) * kVector;
  read(at);
  wait_for_previous_kernel();
  while (at < p.in_features) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      if (at + h * kStep >= p.in_features) continue;
#pragma unroll
      for (int t = 0; t < kRows; ++t) {
        float v[kVector];
        load_vector(x + min(row + t, p.n - 1) * p.in_features + at + h * kStep, v);
#pragma unroll
        for (int i = 0; i < kRanks; ++i)
#pragma unroll
          for (int e = 0; e < kVector; ++e) sum[i][t] = fmaf(down[h][i][e], v[e], sum[i][t]);
      }
    }
    at += kHeld * kStep;
    read(at);
  }
#pragma unroll
  for (int i = 0; i < kRanks; ++i)
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      const float total = warp_sum(sum[i][t]);
      if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp][i * kRows + t] = total;
    }
  __syncthreads();
  const int64_t i = threadIdx.x / kRows, t = threadIdx.x % kRows;
  if (i >= kRanks || rank + i >= p.ranks || row + t >= p.n) return;
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w][threadIdx.x];
  p.between[(row + t) * p.ranks + rank + i] = total;
}

// A thread an output; its ranks in order.
template <int kRows>
__global__ void __launch_bounds__(kUpThreads) low_rank_up_kernel(mlspec_cuda_low_rank_up p) {
  launch_dependents();
  const int64_t at = int64_t(blockIdx.x) * kUpThreads + threadIdx.x, row = int64_t(blockIdx.y) * kRows;
  const bool real = at < p.out_features;
  const int64_t first = real ? p.first[at] : 0;
  float sum[kRows] = {}, up[kUpHeld];
  const auto read = [&](int64_t from) {
#pragma unroll
    for (int h = 0; h < kUpHeld; ++h) up[h] = real && from + h < p.rank ? p.up[(from + h) * p.out_features + at] : 0.f;
  };
  read(0);
  wait_for_previous_kernel();
  if (!real) return;
  for (int64_t from = 0; from < p.rank;) {
#pragma unroll
    for (int h = 0; h < kUpHeld; ++h) {
      if (from + h >= p.rank) continue;
      const int64_t rank = min(max(first + from + h, int64_t(0)), p.ranks - 1);  // the nearest one there is
#pragma unroll
      for (int t = 0; t < kRows; ++t) sum[t] = fmaf(up[h], p.between[min(row + t, p.n - 1) * p.ranks + rank], sum[t]);
    }
    from += kUpHeld;
    if (from < p.rank) read(from);
  }
  const auto* y = static_cast<const __nv_bfloat16*>(p.y);
  auto* out = static_cast<__nv_bfloat16*>(p.out);
#pragma unroll
  for (int t = 0; t < kRows; ++t)
    if (row + t < p.n) store_one(out + (row + t) * p.out_features + at, load_one(y + (row + t) * p.out_features + at) + sum[t]);
}

template <int kRanks, int kRows>
const char* launch_down(const mlspec_cuda_low_rank_down& p, const mlspec_cuda_row_launch& how) {
  const RowGrid grid{dim3(blocks_for(p.ranks, kRanks), blocks_for(p.n, kRows)), kThreads};
  return launch_rows(how, grid, low_rank_down_kernel<kRanks, kRows>, p);
}

template <int kRows>
const char* launch_up(const mlspec_cuda_low_rank_up& p, const mlspec_cuda_row_launch& how) {
  const RowGrid grid{dim3(blocks_for(p.out_features, kUpThreads), blocks_for(p.n, kRows)), kUpThreads};
  return launch_rows(how, grid, low_rank_up_kernel<kRows>, p);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_low_rank_between(const mlspec_cuda_low_rank_down* down, const mlspec_cuda_row_launch* how) {
  if (down->n == 1) return launch_down<1, 1>(*down, *how);
  if (down->n == 2) return launch_down<1, 2>(*down, *how);
  if (down->n <= 4) return launch_down<1, 4>(*down, *how);
  if (down->n <= kFewRows) return launch_down<1, 8>(*down, *how);
  return launch_down<4, 8>(*down, *how);
}

const char* mlspec_cuda_low_rank_added(const mlspec_cuda_low_rank_up* up, const mlspec_cuda_row_launch* how) {
  if (up->n == 1) return launch_up<1>(*up, *how);
  if (up->n == 2) return launch_up<2>(*up, *how);
  if (up->n <= 4) return launch_up<4>(*up, *how);
  return launch_up<8>(*up, *how);
}
