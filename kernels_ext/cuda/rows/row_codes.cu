// How do gated rows, or rows as they are, become integers, put in order on the way? The rounded elements of row_ops.cu, coded where
// they are computed.
#include "activation.cuh"
#include "codes_of_rows.cuh"

namespace mlspec {
namespace {

constexpr int kCodeThreads = 64;  // small blocks spread a row over the chip
constexpr int kMostGridRows = 65535;
constexpr int kLineThreads = 512, kLineRows = 4, kLineBytes = 96 * 1024;  // of ordered rows through shared memory

struct Source {
  const __nv_bfloat16 *x, *up;  // up: null where rows are as they are
  int64_t stride;               // of rows of either
  const int32_t* order;         // or null
};

// Column `at` of a row that begins at `first`, rounded.
template <int kActivation>
__device__ __forceinline__ float element_of(const Source& from, int64_t first, int at) {
  const float x = load_one(from.x + first + at);
  if constexpr (kActivation == kPlain) return x;
  else return rounded(activate<kActivation>(x) * load_one(from.up + first + at));
}

template <int kActivation>
__device__ __forceinline__ void eight_of(const Source& from, int64_t first, int at, float (&v)[kVector]) {
  load_vector(from.x + first + at, v);
  if constexpr (kActivation != kPlain) {
    float up[kVector];
    load_vector(from.up + first + at, up);
#pragma unroll
    for (int e = 0; e < kVector; ++e) v[e] = rounded(activate<kActivation>(v[e]) * up[e]);
  }
}

__device__ __forceinline__ void coded_columns(const int32_t* order, int at, int width, int (&column)[kCoded]) {
#pragma unroll
  for (int e = 0; e < kCoded; ++e) column[e] = at < width ? column_of(order, at + e, width) : 0;
}

// A thread has 16 columns of every row of its part.
template <int kActivation, bool kOrdered>
__global__ void __launch_bounds__(kCodeThreads) row_codes_kernel(const Source from, const CodedRows codes) {
  launch_dependents();
  const int at = (int(blockIdx.x) * kCodeThreads + int(threadIdx.x)) * kCoded, width = codes.in_features;
  int column[kCoded];
  if constexpr (kOrdered) coded_columns(from.order, at, width, column);
  wait_for_previous_kernel();
  for (int row = blockIdx.y; row < codes.num_tokens; row += gridDim.y) {
    const int64_t first = row * from.stride;
    float v[kCoded] = {};
    if (at < width) {
      if constexpr (kOrdered) {
#pragma unroll
        for (int e = 0; e < kCoded; ++e) v[e] = element_of<kActivation>(from, first, column[e]);
      } else {
#pragma unroll
        for (int half = 0; half < kCoded; half += kVector) {
          float part[kVector];
          eight_of<kActivation>(from, first, at + half, part);
#pragma unroll
          for (int e = 0; e < kVector; ++e) v[half + e] = part[e];
        }
      }
    }
    code_values(codes, row, at, v, true);
  }
}

// Several rows in an order: a block brings a whole one to shared memory and codes blockIdx.x's share of it.
template <int kActivation>
__global__ void __launch_bounds__(kLineThreads) line_codes_kernel(const Source from, const CodedRows codes, int share) {
  extern __shared__ __align__(16) __nv_bfloat16 line[];
  launch_dependents();
  wait_for_previous_kernel();
  const int width = codes.in_features, row = blockIdx.y;
  const int64_t first = row * from.stride;
  for (int at = threadIdx.x * kVector; at < width; at += kLineThreads * kVector) {
    float v[kVector];
    eight_of<kActivation>(from, first, at, v);
    store_vector(line + at, v);
  }
  __syncthreads();
  const int begin = blockIdx.x * share, end = min(scaled_columns(width), begin + share);
  for (int base = begin; base < end; base += kLineThreads * kCoded) {
    const int at = base + threadIdx.x * kCoded;
    float v[kCoded] = {};
    if (at < min(end, width)) {
      int column[kCoded];
      coded_columns(from.order, at, width, column);
#pragma unroll
      for (int e = 0; e < kCoded; ++e) v[e] = load_one(line + column[e]);
    }
    code_values(codes, row, at, v, at < end);
  }
}

template <int kActivation>
const char* launch_codes_of(const Source& from, const CodedRows& codes, const mlspec_cuda_row_launch& how) {
  const int64_t n = codes.num_tokens, width = codes.in_features;
  if (from.order && n >= kLineRows && n <= kMostGridRows && width * 2 <= kLineBytes) {
    const int splits = n <= 32 ? 4 : n <= 64 ? 2 : 1, pieces = scaled_columns(int(width)) / 128;
    const int share = (pieces + splits - 1) / splits * 128;
    return launch_rows(how, {dim3(unsigned(splits), unsigned(n)), kLineThreads, unsigned(width * 2)}, line_codes_kernel<kActivation>,
                       from, codes, share);
  }
  const RowGrid grid{dim3(blocks_for(scaled_columns(int(width)), kCodeThreads * kCoded), unsigned(n < kMostGridRows ? n : kMostGridRows)),
                     kCodeThreads};
  return from.order ? launch_rows(how, grid, row_codes_kernel<kActivation, true>, from, codes)
                    : launch_rows(how, grid, row_codes_kernel<kActivation, false>, from, codes);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_row_codes(const void* x, const void* up, int64_t stride, int32_t activation, const int32_t* order,
                                  const mlspec_cuda_quantize* codes, const mlspec_cuda_row_launch* how) {
  if (const char* problem = problem_of_codes(*codes)) return problem;
  const Source from{static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(up), stride, order};
  const CodedRows coded = coded_rows(*codes);
  if (activation < 0) return launch_codes_of<kPlain>(from, coded, *how);
  return with_activation(activation, [&](auto number) { return launch_codes_of<decltype(number)::value>(from, coded, *how); });
}
