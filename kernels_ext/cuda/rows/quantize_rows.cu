// Which integers does a row of bfloat16 become? Exactly the numbers of hf_mlspec/formats/activations.py, on every chip.
#include "../ptx.cuh"
#include "codes_of_rows.cuh"

namespace mlspec {
namespace {

constexpr int kThreads = 128;

// Zeros beyond the row.
__device__ void load_values(float (&values)[kCoded], const __nv_bfloat16* row, int column, int size) {
  const bool aligned = size % 8 == 0;
#pragma unroll
  for (int i = 0; i < kCoded; i += 8) {
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

// One thread, 16 elements of a token.
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const CodedRows p, const __nv_bfloat16* x, int blocks_of_row) {
  launch_dependents();
  wait_for_previous_kernel();
  const int token = blockIdx.x / blocks_of_row, column = (blockIdx.x % blocks_of_row * kThreads + threadIdx.x) * kCoded;
  float values[kCoded];
  load_values(values, x + size_t(token) * p.in_features, column, p.in_features);
  code_values(p, token, column, values, true);
}

cudaError_t launch(const mlspec_cuda_quantize& a) {
  const int blocks_of_row = (scaled_columns(int(a.in_features)) + kThreads * kCoded - 1) / (kThreads * kCoded);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(a.num_tokens * blocks_of_row));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(a.stream);
  config.attrs = &attribute;
  config.numAttrs = a.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, quantize_rows_kernel, coded_rows(a), static_cast<const __nv_bfloat16*>(a.x), blocks_of_row);
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_quantize_rows(const mlspec_cuda_quantize* args) {
  if (const char* problem = mlspec::problem_of_codes(*args)) return problem;
  const cudaError_t error = mlspec::launch(*args);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
