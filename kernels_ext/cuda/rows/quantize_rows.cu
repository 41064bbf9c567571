// Which integers does a row of bfloat16 become? Exactly the numbers of hf_mlspec/formats/activations.py, on every chip.
#include <cuda_bf16.h>

#include "../../formats.h"
#include "../linear/linear.h"
#include "../ptx.cuh"

namespace mlspec {
namespace {

constexpr int kThreads = 128, kElements = 16;  // of a thread

struct QuantizeParams {
  const __nv_bfloat16* x;
  int8_t* codes;
  float* scales;
  int num_tokens, in_features, scale_stride, group_size, blocks_of_row, first_outlier;
  float largest;  // code: 127 or 7
  float clip;     // where codes have 4 bits
  bool for_linear;
};

// Zeros beyond the row.
__device__ void load_values(float (&values)[kElements], const __nv_bfloat16* row, int column, int size) {
  const bool aligned = size % 8 == 0;
#pragma unroll
  for (int i = 0; i < kElements; i += 8) {
    uint4 bits = {0, 0, 0, 0};
    __nv_bfloat16* eight = reinterpret_cast<__nv_bfloat16*>(&bits);
    if (aligned && column + i < size) bits = *reinterpret_cast<const uint4*>(row + column + i);
    else
      for (int j = 0; j < 8; ++j)
        if (column + i + j < size) eight[j] = row[column + i + j];
#pragma unroll
    for (int j = 0; j < 8; ++j) values[i + j] = __bfloat162float(eight[j]);
  }
}

// Infinite where the group holds NaN or Inf. `lanes` neighbours share it.
__device__ float largest_of_group(const float (&values)[kElements], int lanes) {
  const float infinity = __int_as_float(0x7F800000);
  float amax = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) amax = fabsf(values[i]) < infinity ? fmaxf(amax, fabsf(values[i])) : infinity;
  for (int step = 1; step < lanes; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  return amax;
}

// for_linear: the order 0 8 1 9 .. 7 15.
__device__ void store_codes(const QuantizeParams& p, const float (&values)[kElements], float factor, int limit, int8_t* row,
                            int column) {
  int8_t codes[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int source = p.for_linear ? i % 2 * 8 + i / 2 : i;
    codes[i] = int8_t(max(-limit, min(limit, __float2int_rn(__fmul_rn(values[source], factor)))));
  }
  if (p.in_features % kElements == 0) {
    *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<uint4*>(codes);
  } else {
    for (int i = 0; i < kElements && column + i < p.in_features; ++i) row[column + i] = codes[i];
  }
}

// One thread, 16 elements of a token.
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const QuantizeParams p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int token = blockIdx.x / p.blocks_of_row;
  const int column = (blockIdx.x % p.blocks_of_row * kThreads + threadIdx.x) * kElements, group = column / p.group_size;
  const float infinity = __int_as_float(0x7F800000);
  float values[kElements];
  load_values(values, p.x + size_t(token) * p.in_features, column, p.in_features);
  const float amax = largest_of_group(values, p.group_size / kElements);
  const bool outlier = column >= p.first_outlier;
  const float largest = outlier ? 127.0f : p.largest, reach = __fmul_rn(amax, outlier ? 1.0f : p.clip);
  const float quotient = __fdiv_rn(largest, reach);
  const bool finite = amax < infinity, coded = finite && quotient < infinity;
  if (!coded)
    for (int i = 0; i < kElements; ++i) values[i] = 0;  // NaN times 0 would stay
  if (column < p.in_features)
    store_codes(p, values, coded ? quotient : 0, int(largest), p.codes + size_t(token) * p.in_features, column);
  if (column % p.group_size) return;
  const float scale = coded ? __fdiv_rn(reach, largest) : finite ? 0.0f : __int_as_float(0x7FC00000);
  if (!p.for_linear) {
    const int groups = (p.in_features + p.group_size - 1) / p.group_size;
    if (group < groups) p.scales[size_t(token) * groups + group] = scale;
  } else if (column < (p.in_features + 127) / 128 * 128) {
    float* row = p.scales + size_t(group) * p.scale_stride;
    row[token] = scale;
    for (int beyond = p.num_tokens; token == p.num_tokens - 1 && beyond < p.scale_stride; ++beyond) row[beyond] = 0;
  }
}

const char* problem_of(const mlspec_cuda_quantize& a) {
  if (a.num_tokens < 1 || a.in_features < 1) return "num_tokens and in_features must be at least 1";
  if (!is_group_size(a.group_size)) return "groups hold 32, 64 or 128 elements";
  if (a.bits != 8 && a.bits != 4) return "activations become 8 or 4 bits";
  if (a.bits == 4 && !(a.clip > 0 && a.clip <= 1)) return "clip must be above 0 and at most 1";
  if (a.outliers < 0 || a.outliers > a.in_features || a.outliers % a.group_size || (a.outliers && a.in_features % a.group_size))
    return "outliers are whole groups";
  if (!a.for_linear) return nullptr;
  if (a.in_features % 32) return "in_features must be a multiple of 32: pad x and the weight";
  return a.scale_stride % 4 || a.scale_stride < a.num_tokens ? "scale_stride must be a multiple of 4 and at least num_tokens"
                                                             : nullptr;
}

cudaError_t launch(const mlspec_cuda_quantize& a) {
  const int blocks_of_row = int((a.in_features + 127) / 128 * 128 + kThreads * kElements - 1) / (kThreads * kElements);
  const QuantizeParams params{static_cast<const __nv_bfloat16*>(a.x), static_cast<int8_t*>(a.codes), a.scales,
                              int(a.num_tokens), int(a.in_features), int(a.scale_stride), a.group_size, blocks_of_row,
                              a.outliers ? int(a.in_features) - a.outliers : INT32_MAX,
                              a.bits == 8 ? 127.0f : 7.0f, a.bits == 8 ? 1.0f : a.clip, a.for_linear != 0};
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(a.num_tokens * blocks_of_row));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(a.stream);
  config.attrs = &attribute;
  config.numAttrs = a.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, quantize_rows_kernel, params);
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_quantize_rows(const mlspec_cuda_quantize* args) {
  if (const char* problem = mlspec::problem_of(*args)) return problem;
  const cudaError_t error = mlspec::launch(*args);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
