// How do the kernels of nested BF16 weights meet torch on a GPU? Schemas: hf_mlspec/ops/nested, tiles:
// hf_mlspec/ops/nested/tiles_cuda.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "linear.h"
#include "../../cuda/nested/nested_rows.h"
#include "../../cuda/portable/portable_linear.h"

namespace {

using namespace mlspec;
using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kShiftBytes = 4;

#if MLSPEC_HOPPER
constexpr LinearKernel kHopperNested = mlspec_cuda_nested_linear;
#else
constexpr LinearKernel kHopperNested = nullptr;
#endif

// in_features of the weight.
int64_t check_nested(const char* op, const Tensor& draft, const Tensor& exponents, const Tensor& low, int64_t out) {
  check_dtype(op, "draft_tiles", draft, at::kByte);
  TORCH_CHECK_VALUE(exponents.dim() == 3, op, ": exponent_tiles has shape ", exponents.sizes(),
                    ", expected 3 axes from prepack_nested on a GPU");
  TORCH_CHECK_VALUE(out >= 0, op, ": out_features is ", out, ", it cannot be negative");
  const int64_t in = exponents.size(1) * kBlock;
  const int64_t pairs = round_up(out, kPairOutputs) / kPairOutputs, chunks = round_up(in, kPairInputs) / kPairInputs;
  const int64_t expected[] = {pairs, chunks, gpu_tiles::kPairDraftBytes};
  TORCH_CHECK_VALUE(draft.sizes() == at::IntArrayRef(expected), op, ": draft_tiles has shape ", draft.sizes(), ", expected ",
                    at::IntArrayRef(expected), " from prepack_nested on a GPU for out_features = ", out, ", in_features = ", in);
  check_part(op, "draft_tiles", draft, at::kByte, expected, "draft_tiles", draft);
  check_part(op, "exponent_tiles", exponents, at::kByte, {1, in / kBlock, kShiftBytes}, "draft_tiles", draft, kShiftBytes);
  check_part(op, "low_tiles", low, at::kByte, {pairs, chunks, gpu_tiles::kPairLowBytes}, "draft_tiles", draft);
  return in;
}

Tensor nested_linear(const Tensor& x, const Tensor& draft_tiles, const Tensor& exponent_tiles, const Tensor& low_tiles,
                     const Tensor& codebook, int64_t out_features, const Maybe& bias, int64_t weight_bits,
                     int64_t activation_bits) {
  constexpr const char* op = "nested_linear";
  mlspec_cuda_linear args{};
  args.in_features = check_nested(op, draft_tiles, exponent_tiles, low_tiles, out_features);
  check_part(op, "codebook", codebook, at::kByte, {kCodebookLevels}, "draft_tiles", draft_tiles, 4);
  const bool exact = weight_bits == 16 && activation_bits == 16;
  TORCH_CHECK_VALUE(exact || (weight_bits == 4 && (activation_bits == 8 || activation_bits == 16)), op, ": weight_bits is ",
                    weight_bits, " and activation_bits ", activation_bits, ", choose one of 16 and 16, 4 and 16, 4 and 8");
  check_linear_x(op, x, "draft_tiles", draft_tiles, args.in_features, bias, out_features);
  args.tiles = draft_tiles.const_data_ptr();
  args.more = exact ? low_tiles.const_data_ptr() : nullptr;
  args.codebook = codebook.const_data_ptr();
  args.exponent_shift = static_cast<const int32_t*>(exponent_tiles.const_data_ptr());
  args.out_features = out_features;
  args.group_size = kBlock;
  args.weight_bits = static_cast<int32_t>(weight_bits);
  args.activation_bits = static_cast<int32_t>(activation_bits);
  return multiply(CudaCall(op, x), {op, args, kHopperNested, mlspec_cuda_portable_nested_linear, true}, x, bias);
}

Tensor nested_rows(const Tensor& ids, const Tensor& draft_tiles, const Tensor& exponent_tiles, const Tensor& low_tiles,
                   int64_t out_features, double scale) {
  constexpr const char* op = "nested_rows";
  check_dtype(op, "ids", ids, at::kInt);
  TORCH_CHECK_VALUE(ids.dim() == 1, op, ": ids has shape ", ids.sizes(), ", expected [n]");
  check_contiguous(op, "ids", ids);
  const int64_t in = check_nested(op, draft_tiles, exponent_tiles, low_tiles, out_features);
  check_device(op, "draft_tiles", draft_tiles, "ids", ids);
  TORCH_CHECK_VALUE(out_features > 0, op, ": out_features is ", out_features, ", a table has 1 row or more");
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": scale is ", scale, ", expected a finite number (1.0: the table's rows as they are)");
  const CudaCall call(op, ids);
  Tensor out = at::empty({ids.size(0), in}, ids.options().dtype(at::kBFloat16));
  if (out.numel() == 0) return out;
  const mlspec_cuda_nested_table table{draft_tiles.const_data_ptr(), low_tiles.const_data_ptr(),
                                       static_cast<const int32_t*>(exponent_tiles.const_data_ptr()), out_features, in};
  const mlspec_cuda_row_launch launch{call.stream(), call.overlap(), call.capability() >= 90};
  call.check(mlspec_cuda_nested_rows(&table, ids.const_data_ptr<int32_t>(), out.size(0), static_cast<float>(scale),
                                     out.mutable_data_ptr(), &launch));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("nested_linear", nested_linear);
  m.impl("nested_rows", nested_rows);
}
