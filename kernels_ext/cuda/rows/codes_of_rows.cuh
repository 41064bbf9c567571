// How do 16 neighbours of a row become integers, in the thread that holds them? Exactly the numbers of hf_mlspec/formats/activations.py.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

#include "../../formats.h"
#include "../linear/linear.h"

namespace mlspec {

constexpr int kCoded = 16;  // elements of a thread

struct CodedRows {
  int8_t* codes;
  float* scales;
  int num_tokens, in_features, scale_stride, group_size, first_outlier;
  float largest;  // code: 127 or 7
  float clip;     // where codes have 4 bits
  bool for_linear;
};

inline CodedRows coded_rows(const mlspec_cuda_quantize& a) {
  return {static_cast<int8_t*>(a.codes), a.scales, int(a.num_tokens), int(a.in_features), int(a.scale_stride), a.group_size,
          a.outliers ? int(a.in_features) - a.outliers : INT32_MAX, a.bits == 8 ? 127.0f : 7.0f, a.bits == 8 ? 1.0f : a.clip,
          a.for_linear != 0};
}

// Null, or what is wrong.
inline const char* problem_of_codes(const mlspec_cuda_quantize& a) {
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

// Elements of a row for which there are scales.
__host__ __device__ __forceinline__ int scaled_columns(int in_features) { return (in_features + 127) / 128 * 128; }

// Infinite where the group holds NaN or Inf. `lanes` neighbours share it.
__device__ __forceinline__ float largest_of_coded(const float (&values)[kCoded], int lanes) {
  const float infinity = __int_as_float(0x7F800000);
  float amax = 0;
#pragma unroll
  for (int i = 0; i < kCoded; ++i) amax = fabsf(values[i]) < infinity ? fmaxf(amax, fabsf(values[i])) : infinity;
  for (int step = 1; step < lanes; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  return amax;
}

// for_linear: the order 0 8 1 9 .. 7 15.
__device__ __forceinline__ void store_coded(const CodedRows& p, const float (&values)[kCoded], float factor, int limit, int8_t* row,
                                            int column) {
  int8_t codes[kCoded];
#pragma unroll
  for (int i = 0; i < kCoded; ++i) {
    const int source = p.for_linear ? i % 2 * 8 + i / 2 : i;
    codes[i] = int8_t(max(-limit, min(limit, __float2int_rn(__fmul_rn(values[source], factor)))));
  }
  if (p.in_features % kCoded == 0) {
    *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<uint4*>(codes);
  } else {
    for (int i = 0; i < kCoded && column + i < p.in_features; ++i) row[column + i] = codes[i];
  }
}

// values: of a token from `column` on, a multiple of 16, zeros beyond the row; changed. Neighbouring lanes have neighbouring columns,
// groups whole, and all lanes of a warp call it; those write that are `active`.
__device__ __forceinline__ void code_values(const CodedRows& p, int token, int column, float (&values)[kCoded], bool active) {
  const float infinity = __int_as_float(0x7F800000), amax = largest_of_coded(values, p.group_size / kCoded);
  if (!active) return;
  const int group = column / p.group_size;
  const bool outlier = column >= p.first_outlier;
  const float largest = outlier ? 127.0f : p.largest, reach = __fmul_rn(amax, outlier ? 1.0f : p.clip);
  const float quotient = __fdiv_rn(largest, reach);
  const bool finite = amax < infinity, coded = finite && quotient < infinity;
  if (!coded)
#pragma unroll
    for (int i = 0; i < kCoded; ++i) values[i] = 0;  // NaN times 0 would stay
  if (column < p.in_features)
    store_coded(p, values, coded ? quotient : 0, int(largest), p.codes + size_t(token) * p.in_features, column);
  if (column % p.group_size) return;
  const float scale = coded ? __fdiv_rn(reach, largest) : finite ? 0.0f : __int_as_float(0x7FC00000);
  if (!p.for_linear) {
    const int groups = (p.in_features + p.group_size - 1) / p.group_size;
    if (group < groups) p.scales[size_t(token) * groups + group] = scale;
  } else if (column < scaled_columns(p.in_features)) {
    float* row = p.scales + size_t(group) * p.scale_stride;
    row[token] = scale;
    for (int beyond = p.num_tokens; token == p.num_tokens - 1 && beyond < p.scale_stride; ++beyond) row[beyond] = 0;
  }
}

}  // namespace mlspec
