// How do the CPU kernels meet torch? Check the operands, split output features over threads, register implementations.
// The schemas are Python's (hf_mlspec/ops/schema.py); this file holds no Python symbol.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "cpu/isa.h"
#include "formats.h"

namespace {

using at::Tensor;
using mlspec::kBlock;

mlspec_dtype kernel_dtype(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return MLSPEC_FLOAT32;
    case at::kBFloat16: return MLSPEC_BFLOAT16;
    case at::kHalf: return MLSPEC_FLOAT16;
    default:
      TORCH_CHECK_TYPE(false, "mxfp4_linear: x is ", x.scalar_type(), ", expected float32, bfloat16 or float16");
  }
}

void check(const Tensor& x, const Tensor& packed, const Tensor& scale, const std::optional<Tensor>& bias) {
  TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte && scale.scalar_type() == at::kByte,
                   "mxfp4_linear: weight_packed is ", packed.scalar_type(), " and weight_scale ", scale.scalar_type(),
                   ", both are torch.uint8");
  TORCH_CHECK_VALUE(packed.dim() == 2 && scale.dim() == 2 && packed.size(0) == scale.size(0) &&
                        packed.size(1) == scale.size(1) * (kBlock / 2),
                    "mxfp4_linear: weight_packed ", packed.sizes(), " and weight_scale ", scale.sizes(),
                    " are not [out, in / 2] and [out, in / ", kBlock, "]");
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == packed.size(1) * 2, "mxfp4_linear: x has shape ", x.sizes(),
                    ", the weight takes in_features = ", packed.size(1) * 2);
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->size(0) == packed.size(0)), "mxfp4_linear: bias has shape ",
                    bias ? bias->sizes() : at::IntArrayRef{}, ", the weight has out_features = ", packed.size(0));
  TORCH_CHECK(packed.is_cpu() && scale.is_cpu() && (!bias || bias->is_cpu()),
              "mxfp4_linear: x is on the CPU, the weight or the bias is not; move them to one device");
}

Tensor mxfp4_linear(const Tensor& x, const Tensor& weight_packed, const Tensor& weight_scale,
                    const std::optional<Tensor>& bias) {
  const mlspec_dtype dtype = kernel_dtype(x);
  check(x, weight_packed, weight_scale, bias);
  const int64_t in = x.size(-1), out = weight_packed.size(0);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  Tensor y = at::empty(shape, x.options());
  const int64_t rows = in ? x.numel() / in : 0;
  if (y.numel() == 0) return y;
  if (in == 0) return bias ? y.copy_(bias->expand(shape)) : y.zero_();

  const mlspec::CpuKernels& kernels = mlspec::cpu_kernels();
  const Tensor flat = x.contiguous(), packed = weight_packed.contiguous(), scale = weight_scale.contiguous();
  const Tensor wide_bias = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const Tensor split = at::empty({rows, in}, x.options().dtype(at::kFloat));
  constexpr int64_t kWorkPerTask = 1 << 16;  // multiply-adds worth the 1-2 us of waking a thread
  at::parallel_for(0, rows, std::max<int64_t>(1, kWorkPerTask / in), [&](int64_t begin, int64_t end) {
    kernels.split_x(flat.const_data_ptr(), dtype, in, begin, end, split.mutable_data_ptr<float>());
  });
  const float* bias_data = bias ? wide_bias.const_data_ptr<float>() : nullptr;
  const mlspec_mxfp4_linear_args args{packed.const_data_ptr<uint8_t>(), scale.const_data_ptr<uint8_t>(),
                                      split.const_data_ptr<float>(), bias_data, y.mutable_data_ptr(),
                                      in, out, rows, dtype};
  constexpr int64_t kGroup = MLSPEC_FEATURE_GROUP;
  const int64_t groups = (out + kGroup - 1) / kGroup;
  const int64_t grain = std::max<int64_t>(1, kWorkPerTask / (kGroup * in * rows));
  at::parallel_for(0, groups, grain, [&](int64_t begin, int64_t end) {
    kernels.mxfp4_linear(&args, begin * kGroup, std::min(end * kGroup, out));
  });
  return y;
}

std::string cpu_isa() { return mlspec::cpu_kernels().isa; }

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) { m.impl("mxfp4_linear", mxfp4_linear); }

TORCH_LIBRARY_IMPL(mlspec, CompositeExplicitAutograd, m) { m.impl("cpu_isa", cpu_isa); }
