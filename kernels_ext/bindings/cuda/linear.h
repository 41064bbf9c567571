// What do the bindings of the linear kernels of GPUs share? A checked weight, and the way of a call from x to the outputs.
#pragma once

#include <optional>
#include <tuple>

#include "device.h"
#include "../../cuda/linear/linear.h"
#include "../../formats.h"

namespace mlspec {

using gpu_tiles::kPairInputs, gpu_tiles::kPairOutputs;

inline int64_t round_up(int64_t items, int64_t step) { return (items + step - 1) / step * step; }

using LinearKernel = const char* (*)(const mlspec_cuda_linear*);

// A weight as a kernel takes it; which kernel depends on the weight and the GPU alone, and so do the bits.
struct LinearWeight {
  const char* op;
  mlspec_cuda_linear args;
  LinearKernel hopper, portable;  // hopper: null where the library is not built for it
  bool fits_hopper;
  bool may_overlap = true;  // false: its tiles may be written by what is enqueued in front
};

// Dtypes, shapes and devices of x [..., in] and bias [out] beside those of the weight.
void check_linear_x(const char* op, const at::Tensor& x, const char* weight_name, const at::Tensor& weight, int64_t in,
                    const std::optional<at::Tensor>& bias, int64_t out);

// How rows become integers.
struct CodesOf {
  int64_t group_size, bits, outliers;
  double clip;
};

// codes int8 [rows, in] and scales float32 [in in whole pairs of tiles / group, rows up to a multiple of 4] for the integer kernels,
// not written yet; args: what writes them, but for x.
struct CodesRoom {
  at::Tensor codes, scales;
  mlspec_cuda_quantize args{};
};
CodesRoom room_for_codes(const CudaCall& call, const at::Tensor& like, int64_t rows, int64_t in, const CodesOf& how);

// Codes and scales of x [rows, in] for the integer kernels, which `args` then reads; both live until the linear is enqueued.
std::tuple<at::Tensor, at::Tensor> quantized(const CudaCall& call, const at::Tensor& x, int64_t group, int64_t bits,
                                             mlspec_cuda_linear& args);

// x [..., in] -> [..., out] in x.dtype; float32 and float16 are rounded to bfloat16 on their way in and out. With out_is_float32:
// float32, not rounded.
at::Tensor multiply(const CudaCall& call, LinearWeight weight, const at::Tensor& x, const std::optional<at::Tensor>& bias);

}  // namespace mlspec
