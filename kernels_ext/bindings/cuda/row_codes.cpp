// How do the ops that make rows and code them as integers meet torch? One kernel where there is one for the sizes, else two, with the
// same bits. What they give: hf_mlspec/ops/row_codes.py.
#include <ATen/ops/empty.h>

#include <tuple>

#include "linear.h"
#include "row_checks.h"

namespace {

using namespace mlspec;

using Codes = std::tuple<Tensor, Tensor>;

// Of rows of `width` columns.
void check_codes(const char* op, const CodesOf& how, const char* name, int64_t width) {
  check_one_of(op, "group_size", how.group_size, kGroupSizes);
  check_one_of(op, "bits", how.bits, {4, 8});
  check_activation_clip(op, how.clip);
  TORCH_CHECK_VALUE(width > 0 && width % 32 == 0, op, ": ", name, " have ", width, " columns, expected a multiple of 32");
  TORCH_CHECK_VALUE(how.outliers == 0 || (how.outliers == kOutliers && how.group_size == kOutliers && width % kOutliers == 0 &&
                                          width > kOutliers),
                    op, ": outliers is ", how.outliers, " of ", width, " columns in groups of ", how.group_size, ", expected 0, or ",
                    kOutliers, " behind whole groups of ", kOutliers);
}

// The codes of rows that a kernel of their own has written.
Codes coded(const CudaCall& call, CodesRoom& room, const Tensor& rows) {
  room.args.x = rows.const_data_ptr();
  call.check(mlspec_cuda_quantize_rows(&room.args));
  return {room.codes, room.scales};
}

std::tuple<Tensor, Tensor, Tensor> norm_codes(const Tensor& x, const Tensor& weight, double eps, const Maybe& residual,
                                              const Maybe& order, int64_t group_size, int64_t bits, double activation_clip,
                                              int64_t outliers) {
  constexpr const char* op = "norm_codes";
  const CodesOf how_coded{group_size, bits, outliers, activation_clip};
  check_norm(op, x, weight, residual, order ? &*order : nullptr);
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, width]");
  const int64_t n = x.size(0), width = x.size(1);
  check_codes(op, how_coded, "rows of x", width);
  const CudaCall call(op, x);
  CodesRoom room = room_for_codes(call, x, n, width, how_coded);
  const Tensor total = at::empty(residual ? x.sizes() : at::IntArrayRef{0}, x.options());
  if (n == 0) return {room.codes, room.scales, total};
  const Tensor rows = dense(x), other = residual ? dense(*residual) : Tensor();
  const Tensor scales = dense(weight.scalar_type() == at::kHalf ? weight.to(at::kFloat) : weight);
  const void* const beside = residual ? other.const_data_ptr() : nullptr;
  void* const sum = residual ? total.mutable_data_ptr() : nullptr;
  const int32_t* const columns = order ? order->const_data_ptr<int32_t>() : nullptr;
  const bool bf16 = scales.scalar_type() == at::kBFloat16;
  const mlspec_cuda_row_launch launch = how(call);
  if (mlspec_cuda_norm_codes_serves(width)) {
    call.check(mlspec_cuda_norm_codes(rows.const_data_ptr(), beside, scales.const_data_ptr(), bf16, static_cast<float>(eps), columns,
                                      sum, &room.args, &launch));
    return {room.codes, room.scales, total};
  }
  const Tensor normed = at::empty(x.sizes(), x.options());
  call.check(mlspec_cuda_rms_norm(rows.const_data_ptr(), beside, scales.const_data_ptr(), bf16, static_cast<float>(eps), n, width,
                                  columns, normed.mutable_data_ptr(), sum, &launch));
  coded(call, room, normed);
  return {room.codes, room.scales, total};
}

// Rows of x, or gated ones (activation from 0 on), in an order or times Hadamard matrices. name: of what x is.
Codes coded_rows_of(const char* op, const char* name, const Tensor& x, int64_t width, int64_t activation, const Maybe& order,
                    const Maybe& matrix, int64_t size, int64_t inner, const CodesOf& how_coded) {
  const bool gated = activation >= 0;
  check_codes(op, how_coded, gated ? "gated rows" : "rows of x", width);
  if (order) check_vector(op, "order", *order, width, name, x);
  TORCH_CHECK_VALUE(!order || (size == 1 && !matrix), op, ": rows are put in an order and rotated, expected one of both");
  check_matrices(op, matrix, size, inner, x, name, width, gated);
  const CudaCall call(op, x);
  const int64_t n = x.size(0);
  CodesRoom room = room_for_codes(call, x, n, width, how_coded);
  if (n == 0) return {room.codes, room.scales};
  const Tensor rows = dense(x);
  const mlspec_cuda_row_launch launch = how(call);
  if (size == 1) {
    const auto* first = static_cast<const char*>(rows.const_data_ptr());
    call.check(mlspec_cuda_row_codes(first, gated ? first + width * 2 : nullptr, rows.size(1), static_cast<int32_t>(activation),
                                     order ? order->const_data_ptr<int32_t>() : nullptr, &room.args, &launch));
    return {room.codes, room.scales};
  }
  mlspec_cuda_hadamard hadamard = hadamard_of(call, rows, matrix, size, inner, n, width, static_cast<int32_t>(activation));
  if (mlspec_cuda_hadamard_codes_serves(&hadamard, room.args.group_size)) {
    call.check(mlspec_cuda_hadamard_codes(&hadamard, &room.args, &launch));
    return {room.codes, room.scales};
  }
  const Tensor turned = at::empty({n, width}, x.options());
  hadamard.out = turned.mutable_data_ptr();
  call.check(mlspec_cuda_hadamard_rows(&hadamard, &launch));
  return coded(call, room, turned);
}

Codes row_codes(const Tensor& x, const Maybe& order, const Maybe& matrix, int64_t size, int64_t inner, int64_t group_size, int64_t bits,
                double activation_clip, int64_t outliers) {
  constexpr const char* op = "row_codes";
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, width]");
  return coded_rows_of(op, "x", x, x.size(1), -1, order, matrix, size, inner, {group_size, bits, outliers, activation_clip});
}

Codes gated_codes(const Tensor& gate_up, int64_t activation, const Maybe& order, const Maybe& matrix, int64_t size, int64_t inner,
                  int64_t group_size, int64_t bits, double activation_clip, int64_t outliers) {
  constexpr const char* op = "gated_codes";
  check_gated(op, gate_up, activation);
  return coded_rows_of(op, "gate_up", gate_up, gate_up.size(1) / 2, activation, order, matrix, size, inner,
                       {group_size, bits, outliers, activation_clip});
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("norm_codes", norm_codes);
  m.impl("row_codes", row_codes);
  m.impl("gated_codes", gated_codes);
}
