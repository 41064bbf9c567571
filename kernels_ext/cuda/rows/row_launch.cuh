// How is a kernel over rows launched, how are its elements read, and how do threads add up a row in one fixed order?
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "../ptx.cuh"
#include "rows.h"

namespace mlspec {

constexpr int kWarp = 32;
constexpr int kVector = 8;  // elements that are read, computed and written together
constexpr int kTailBytes = 4;  // behind the codes of a key or value: their scale, or their ends

struct RowGrid {
  dim3 blocks;
  unsigned threads;
  unsigned shared_bytes = 0;
  unsigned cluster = 1;
};

template <class... Parameters, class... Arguments>
const char* launch_rows(const mlspec_cuda_row_launch& how, const RowGrid& grid, void (*kernel)(Parameters...),
                        Arguments... arguments) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(how.stream);
  config.attrs = attributes;
  if (how.overlap) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {grid.cluster, 1, 1};
  }
  cudaError_t error = cudaSuccess;
  if (grid.shared_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(grid.shared_bytes));
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // told here; left behind, it would be found by someone else's check
  return cudaGetErrorString(error);
}

inline unsigned blocks_for(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }

__device__ __forceinline__ float2 widened(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}

__device__ __forceinline__ uint32_t narrowed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return uint32_t(__bfloat16_as_ushort(pair.y)) << 16 | __bfloat16_as_ushort(pair.x);
}

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

__device__ __forceinline__ void load_vector(const __nv_bfloat16* from, float (&v)[kVector]) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const float2 a = widened(words.x), b = widened(words.y), c = widened(words.z), d = widened(words.w);
  v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y, v[4] = c.x, v[5] = c.y, v[6] = d.x, v[7] = d.y;
}

__device__ __forceinline__ void load_vector(const float* from, float (&v)[kVector]) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

__device__ __forceinline__ void store_vector(__nv_bfloat16* to, const float (&v)[kVector]) {
  *reinterpret_cast<uint4*>(to) =
      make_uint4(narrowed(v[0], v[1]), narrowed(v[2], v[3]), narrowed(v[4], v[5]), narrowed(v[6], v[7]));
}

__device__ __forceinline__ void store_vector(float* to, const float (&v)[kVector]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ float load_one(const __nv_bfloat16* from) { return __bfloat162float(*from); }
__device__ __forceinline__ float load_one(const float* from) { return *from; }
__device__ __forceinline__ void store_one(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }
__device__ __forceinline__ void store_one(float* to, float value) { *to = value; }

// The column that place `at` of an ordered row takes, the nearest one there is.
__device__ __forceinline__ int column_of(const int32_t* order, int64_t at, int64_t width) {
  const int from = order[at];
  return from < 0 ? 0 : from < width ? from : int(width - 1);
}

// In a tree of lanes; every lane has the sum.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}

// Lanes, then warps in the same tree; every thread has the sum. shared: [32], not in use.
__device__ __forceinline__ float block_sum(float value, float* shared) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  value = warp_sum(value);
  if (lane == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_sum(lane < warps ? shared[lane] : 0.f);
}

}  // namespace mlspec
