// How do the kernels of sparse high parts, and of embeddings in two parts, meet torch on a GPU? What the ops take: hf_mlspec/ops/zipper.py. Nothing is read back: the
// sparse rows are trusted, prepack_zipper made them.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <numeric>
#include <vector>

#include "row_checks.h"
#include "../zipper_places.h"
#include "../zipper_table.h"
#include "../../cuda/zipper/zipper_high.h"
#include "../../cuda/zipper/zipper_rows.h"

namespace {

using namespace mlspec;

constexpr int64_t kBlock = 32;  // a multiple of so many inputs

void check_operands(const char* op, const Tensor& x, const Tensor& low, const Tensor& high, const Maybe& bias) {
  float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) % kBlock == 0, op, ": x has shape ", x.sizes(), ", a high part has multiples of ",
                    kBlock, " inputs");
  const int64_t out = low.dim() ? low.size(-1) : 0;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  check_part(op, "low", low, at::kFloat, shape, "x", x, 4);
  check_dtype(op, "high", high, at::kInt);
  check_device(op, "high", high, "x", x);
  check_contiguous(op, "high", high);
  if (!bias) return;
  float_dtype(op, "bias", *bias);
  check_shape(op, "bias", *bias, {out});
  check_device(op, "bias", *bias, "x", x);
}

// The cells of one weight of so many outputs, from integer `begin` of `high` on, which ends before `end`.
mlspec_cuda_zipper_cells cells_of(const char* op, const Tensor& high, int64_t in, int64_t first_output, int64_t outputs, int64_t begin,
                                  int64_t end) {
  const ZipperPlaces places(in, outputs);
  TORCH_CHECK_VALUE(begin >= 0 && outputs >= 0 && end <= high.numel() && begin + places.words <= end, op, ": high has shape ",
                    high.sizes(), ", expected [", places.words, " + words] from prepack_zipper");
  const int32_t* const numbers = high.const_data_ptr<int32_t>() + begin;
  return {first_output, outputs, numbers + places.wide, reinterpret_cast<const float*>(numbers + places.step),
          numbers + places.starts, numbers + places.words};
}

Tensor add_high(const char* op, const Tensor& x, const Tensor& low, mlspec_cuda_zipper_high& args, const Maybe& bias) {
  const CudaCall call(op, x);
  const bool narrow = x.scalar_type() == at::kBFloat16;
  Tensor y = at::empty(low.sizes(), x.options().dtype(narrow ? at::kBFloat16 : at::kFloat));
  if (y.numel() == 0) return y.to(x.scalar_type());
  if (x.size(-1) == 0) return (bias ? low.clone().add_(*bias) : low.clone()).to(x.scalar_type());
  const Tensor rows = dense(x.to(at::kBFloat16));
  const bool bias_is_bf16 = bias && bias->scalar_type() == at::kBFloat16;
  const Tensor added = !bias ? Tensor() : bias_is_bf16 ? bias->contiguous() : bias->to(at::kFloat).contiguous();
  args.x = rows.const_data_ptr();
  args.low = low.const_data_ptr<float>();
  args.bias = bias ? added.const_data_ptr() : nullptr;
  args.bias_is_float32 = !bias_is_bf16;
  args.y = y.mutable_data_ptr();
  args.y_is_float32 = !narrow;
  args.in_features = x.size(-1);
  args.out_features = low.size(-1);
  args.num_tokens = low.numel() / args.out_features;
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_zipper_high_linear(&args, &launch));
  return y.to(x.scalar_type());
}

Tensor zipper_high_linear(const Tensor& x, const Tensor& low, const Tensor& high, const Maybe& bias) {
  constexpr const char* op = "zipper_high_linear";
  check_operands(op, x, low, high, bias);
  TORCH_CHECK_VALUE(high.dim() == 1, op, ": high has shape ", high.sizes(), ", expected one axis from prepack_zipper");
  mlspec_cuda_zipper_high args{};
  args.segments[0] = cells_of(op, high, x.size(-1), 0, low.size(-1), 0, high.numel());
  args.num_segments = 1;
  return add_high(op, x, low, args, bias);
}

Tensor zipper_high_joined(const Tensor& x, const Tensor& low, const Tensor& high, const Maybe& bias, at::IntArrayRef outputs,
                          at::IntArrayRef begins) {
  constexpr const char* op = "zipper_high_joined";
  check_operands(op, x, low, high, bias);
  const auto count = static_cast<int64_t>(outputs.size());
  TORCH_CHECK_VALUE(high.dim() == 1 && 1 <= count && count <= MLSPEC_CUDA_ZIPPER_SEGMENTS && begins.size() == outputs.size(), op,
                    ": outputs are ", outputs, " and begins ", begins, ", expected those of 1 to ", +MLSPEC_CUDA_ZIPPER_SEGMENTS,
                    " weights in one tensor");
  const int64_t all = std::accumulate(outputs.begin(), outputs.end(), int64_t{0});
  TORCH_CHECK_VALUE(all == low.size(-1), op, ": outputs are ", outputs, ", low has shape ", low.sizes());
  mlspec_cuda_zipper_high args{};
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    args.segments[i] = cells_of(op, high, x.size(-1), first, outputs[i], begins[i], i + 1 < count ? begins[i + 1] : high.numel());
    first += outputs[i];
  }
  args.num_segments = static_cast<int32_t>(count);
  return add_high(op, x, low, args, bias);
}

Tensor zipper_rows(const Tensor& ids, const Tensor& planes, const Tensor& step, const Tensor& places, int64_t lowest, double scale) {
  constexpr const char* op = "zipper_rows";
  const CodeRows sizes = checked_code_rows(op, ids, planes, step, places, lowest, scale);
  check_device(op, "planes", planes, "ids", ids);
  check_device(op, "step", step, "ids", ids);
  check_device(op, "places", places, "ids", ids);
  const CudaCall call(op, ids);
  Tensor out = at::empty({ids.size(0), sizes.width}, ids.options().dtype(at::kBFloat16));
  if (out.numel() == 0) return out;
  const int32_t* const begins = sizes.sparse ? places.const_data_ptr<int32_t>() : nullptr;
  const mlspec_cuda_zipper_table table{planes.const_data_ptr<uint8_t>(), step.const_data_ptr(), begins,
                                       sizes.sparse ? reinterpret_cast<const uint8_t*>(begins + sizes.rows + 1) : nullptr,
                                       sizes.rows, sizes.width, static_cast<int32_t>(sizes.count), static_cast<int32_t>(lowest)};
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_zipper_rows(&table, ids.const_data_ptr<int32_t>(), out.size(0), static_cast<float>(scale),
                                     out.mutable_data_ptr(), &launch));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("zipper_high_linear", zipper_high_linear);
  m.impl("zipper_high_joined", zipper_high_joined);
  m.impl("zipper_rows", zipper_rows);
}
