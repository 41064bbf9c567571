// How do the kernels over rows and their logits meet torch on a GPU? What the ops take: hf_mlspec/ops/rows.py. Activations are
// bfloat16 here.
#include <ATen/ops/empty.h>

#include <tuple>
#include <vector>

#include "low_rank.h"
#include "row_checks.h"

namespace mlspec {

void check_low_rank(const char* op, const Tensor& between, const Tensor& up, const Tensor& first, int64_t n, int64_t outputs,
                    const char* x_name, const Tensor& x) {
  TORCH_CHECK_VALUE(between.dim() == 2 && between.size(1) > 0, op, ": between has shape ", between.sizes(), ", expected [n, ranks]");
  TORCH_CHECK_VALUE(up.dim() == 2 && up.size(0) > 0, op, ": up has shape ", up.sizes(), ", expected [rank, out]");
  check_part(op, "between", between, at::kFloat, {n, between.size(1)}, x_name, x, 4);
  check_part(op, "up", up, at::kFloat, {up.size(0), outputs}, x_name, x, 4);
  check_vector(op, "first", first, outputs, x_name, x);
}

Tensor with_low_rank(const CudaCall& call, const Tensor& y, const Tensor& between, const Tensor& up, const Tensor& first) {
  Tensor out = at::empty(y.sizes(), y.options());
  if (out.numel() == 0) return out;
  const Tensor base = dense(y);
  const mlspec_cuda_low_rank_up args = {base.const_data_ptr(), between.const_data_ptr<float>(), up.const_data_ptr<float>(),
                                        first.const_data_ptr<int32_t>(), out.mutable_data_ptr(), y.size(0), y.size(1),
                                        between.size(1), up.size(0)};
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_low_rank_added(&args, &launch));
  return out;
}

}  // namespace mlspec

namespace {

using namespace mlspec;

constexpr int64_t kMostLowRankRows = 8 * 65535;  // eight a block of a grid

std::tuple<Tensor, Tensor> norm_by(const char* op, const Tensor& x, const Tensor& weight, double eps, const Maybe& residual,
                                   const Tensor* order) {
  check_norm(op, x, weight, residual, order);
  const int64_t width = x.size(-1);
  const CudaCall call(op, x);
  Tensor normed = at::empty(x.sizes(), x.options()), total = at::empty(residual ? x.sizes() : at::IntArrayRef{0}, x.options());
  if (x.numel() == 0) return {normed, total};
  const Tensor flat = dense(x), other = residual ? dense(*residual) : Tensor();
  const Tensor scales = dense(weight.scalar_type() == at::kHalf ? weight.to(at::kFloat) : weight);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_rms_norm(flat.const_data_ptr(), residual ? other.const_data_ptr() : nullptr, scales.const_data_ptr(),
                                  scales.scalar_type() == at::kBFloat16, static_cast<float>(eps), flat.numel() / width, width,
                                  order ? order->const_data_ptr<int32_t>() : nullptr, normed.mutable_data_ptr(),
                                  residual ? total.mutable_data_ptr() : nullptr, &launch));
  return {normed, total};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps, const Maybe& residual) {
  return norm_by("rms_norm", x, weight, eps, residual, nullptr);
}

std::tuple<Tensor, Tensor> rms_norm_in_order(const Tensor& x, const Tensor& weight, double eps, const Maybe& residual,
                                             const Tensor& order) {
  return norm_by("rms_norm_in_order", x, weight, eps, residual, &order);
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  constexpr const char* op = "silu_mul";
  check_bf16(op, "gate", gate);
  check_bf16(op, "up", up);
  check_shape(op, "up", up, gate.sizes());
  check_device(op, "up", up, "gate", gate);
  const CudaCall call(op, gate);
  Tensor out = at::empty(gate.sizes(), gate.options());
  if (out.numel() == 0) return out;
  const Tensor flat_gate = dense(gate), flat_up = dense(up);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_gated(flat_gate.const_data_ptr(), flat_up.const_data_ptr(), out.numel(), 1, out.numel(), 0, nullptr,
                               out.mutable_data_ptr(), &launch));
  return out;
}

Tensor gated_by(const char* op, const Tensor& gate_up, int64_t activation, const Tensor* order) {
  check_gated(op, gate_up, activation);
  const int64_t n = gate_up.size(0), width = gate_up.size(1) / 2;
  if (order) check_vector(op, "order", *order, width, "gate_up", gate_up);
  const CudaCall call(op, gate_up);
  Tensor out = at::empty({n, width}, gate_up.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(gate_up);
  const auto* gate = static_cast<const char*>(rows.const_data_ptr());
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_gated(gate, gate + width * 2, 2 * width, n, width, static_cast<int32_t>(activation),
                               order ? order->const_data_ptr<int32_t>() : nullptr, out.mutable_data_ptr(), &launch));
  return out;
}

Tensor gated(const Tensor& gate_up, int64_t activation) { return gated_by("gated", gate_up, activation, nullptr); }

Tensor gated_in_order(const Tensor& gate_up, int64_t activation, const Tensor& order) {
  return gated_by("gated_in_order", gate_up, activation, &order);
}

Tensor gated_pairs(const Tensor& gate_up, double slope, double limit) {
  constexpr const char* op = "gated_pairs";
  check_gate_up(op, gate_up);
  TORCH_CHECK_VALUE(std::isfinite(slope) && limit > 0 && std::isfinite(limit), op, ": slope is ", slope, " and limit ", limit,
                    ", expected finite numbers, the limit above 0");
  const CudaCall call(op, gate_up);
  Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(gate_up);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_gated_pairs(rows.const_data_ptr(), out.size(0), out.size(1), static_cast<float>(slope),
                                     static_cast<float>(limit), out.mutable_data_ptr(), &launch));
  return out;
}

Tensor ordered_rows(const Tensor& x, const Tensor& order) {
  constexpr const char* op = "ordered_rows";
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, width]");
  check_vector(op, "order", order, x.size(1), "x", x);
  const CudaCall call(op, x);
  Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(x);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_ordered_rows(rows.const_data_ptr(), order.const_data_ptr<int32_t>(), x.size(0), x.size(1),
                                      out.mutable_data_ptr(), &launch));
  return out;
}

Tensor low_rank_between(const Tensor& x, const Tensor& down) {
  constexpr const char* op = "low_rank_between";
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(down.dim() == 2 && down.size(0) > 0, op, ": down has shape ", down.sizes(), ", expected [ranks, in]");
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == down.size(1), op, ": x has shape ", x.sizes(), ", expected [n, ", down.size(1), "]");
  const int64_t n = x.size(0), inputs = x.size(1), ranks = down.size(0);
  check_part(op, "down", down, at::kFloat, {ranks, inputs}, "x", x);
  TORCH_CHECK_VALUE(inputs % 8 == 0, op, ": x has ", inputs, " columns, the CUDA kernels take multiples of 8");
  TORCH_CHECK_VALUE(n <= kMostLowRankRows, op, ": ", n, " rows, expected up to ", kMostLowRankRows);
  const CudaCall call(op, x);
  Tensor between = at::empty({n, ranks}, down.options());
  if (n == 0) return between;
  const Tensor rows = dense(x);
  const mlspec_cuda_low_rank_down args = {rows.const_data_ptr(), down.const_data_ptr<float>(), between.mutable_data_ptr<float>(), n,
                                          inputs, ranks};
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_low_rank_between(&args, &launch));
  return between;
}

Tensor low_rank_added(const Tensor& y, const Tensor& between, const Tensor& up, const Tensor& first) {
  constexpr const char* op = "low_rank_added";
  check_bf16(op, "y", y);
  TORCH_CHECK_VALUE(y.dim() == 2, op, ": y has shape ", y.sizes(), ", expected [n, out]");
  TORCH_CHECK_VALUE(y.size(0) <= kMostLowRankRows, op, ": ", y.size(0), " rows, expected up to ", kMostLowRankRows);
  check_low_rank(op, between, up, first, y.size(0), y.size(1), "y", y);
  return with_low_rank(CudaCall(op, y), y, between, up, first);
}

Tensor embed_rows(const Tensor& ids, const Tensor& table, double scale) {
  constexpr const char* op = "embed_rows";
  check_dtype(op, "ids", ids, at::kInt);
  TORCH_CHECK_VALUE(ids.dim() == 1, op, ": ids has shape ", ids.sizes(), ", expected [n]");
  check_contiguous(op, "ids", ids);
  TORCH_CHECK_TYPE(table.scalar_type() == at::kFloat || table.scalar_type() == at::kBFloat16, op, ": table is ",
                   table.scalar_type(), ", expected float32 or bfloat16");
  TORCH_CHECK_VALUE(table.dim() == 2 && table.size(0) > 0, op, ": table has shape ", table.sizes(),
                    ", expected [vocab, hidden] with a vocab of 1 or more");
  check_device(op, "table", table, "ids", ids);
  check_contiguous(op, "table", table);
  if (table.numel() > 0) check_aligned(op, "table", table, kVectorBytes);
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": scale is ", scale, ", expected a finite number (1.0: the table's rows as they are)");
  const CudaCall call(op, ids);
  Tensor out = at::empty({ids.size(0), table.size(1)}, table.options());
  if (out.numel() == 0) return out;
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_embed_rows(ids.const_data_ptr<int32_t>(), table.const_data_ptr(), table.scalar_type() == at::kBFloat16,
                                    table.size(0), ids.size(0), table.size(1), static_cast<float>(scale), out.mutable_data_ptr(),
                                    &launch));
  return out;
}

// Of rows of x, or where there is an activation of gated rows; width: of what is rotated.
Tensor rotated(const char* op, const Tensor& x, const Maybe& matrix, int64_t size, int64_t inner, const char* name, int64_t width,
               int32_t activation) {
  check_matrices(op, matrix, size, inner, x, name, width, activation >= 0);
  const CudaCall call(op, x);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = width;
  Tensor out = at::empty(shape, x.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(x);
  mlspec_cuda_hadamard hadamard = hadamard_of(call, rows, matrix, size, inner, out.numel() / width, width, activation);
  hadamard.out = out.mutable_data_ptr();
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_hadamard_rows(&hadamard, &launch));
  return out;
}

Tensor hadamard_rows(const Tensor& x, const Maybe& matrix, int64_t size, int64_t inner) {
  constexpr const char* op = "hadamard_rows";
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  return rotated(op, x, matrix, size, inner, "x", x.size(-1), -1);
}

Tensor gated_hadamard(const Tensor& gate_up, int64_t activation, const Maybe& matrix, int64_t size, int64_t inner) {
  constexpr const char* op = "gated_hadamard";
  check_gated(op, gate_up, activation);
  return rotated(op, gate_up, matrix, size, inner, "gate_up", gate_up.size(1) / 2, static_cast<int32_t>(activation));
}

std::tuple<Tensor, Tensor> choose_rows(const Tensor& logits, double softcap, const Maybe& seed, const Maybe& streams,
                                       const Maybe& positions) {
  constexpr const char* op = "choose_rows";
  TORCH_CHECK_TYPE(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kBFloat16, op, ": logits is ",
                   logits.scalar_type(), ", expected float32 or bfloat16");
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0, op, ": logits has shape ", logits.sizes(),
                    ", expected [n, vocab] with a vocab of 1 or more");
  check_softcap(op, softcap);
  TORCH_CHECK_VALUE(seed.has_value() == streams.has_value() && seed.has_value() == positions.has_value(), op, ": ",
                    positions ? "positions " : "", seed ? "seed " : "", streams ? "streams " : "",
                    "given alone; noise needs seed, streams and positions");
  const int64_t n = logits.size(0);
  if (seed) {
    check_vector(op, "seed", *seed, seed->numel() == 1 ? 1 : n, "logits", logits, at::kLong);
    check_vector(op, "streams", *streams, n, "logits", logits);
    check_vector(op, "positions", *positions, n, "logits", logits);
  }
  const CudaCall call(op, logits);
  Tensor tokens = at::empty({n}, logits.options().dtype(at::kInt)), confidence = at::empty({n}, logits.options().dtype(at::kFloat));
  if (n == 0) return {tokens, confidence};
  const Tensor rows = dense(logits);
  const mlspec_cuda_choice choice{rows.const_data_ptr(),
                                  logits.scalar_type() == at::kBFloat16,
                                  n,
                                  logits.size(1),
                                  static_cast<float>(softcap),
                                  seed ? seed->const_data_ptr<int64_t>() : nullptr,
                                  seed ? seed->numel() : 0,
                                  seed ? streams->const_data_ptr<int32_t>() : nullptr,
                                  seed ? positions->const_data_ptr<int32_t>() : nullptr,
                                  tokens.mutable_data_ptr<int32_t>(),
                                  confidence.mutable_data_ptr<float>()};
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_choose_rows(&choice, &launch));
  return {tokens, confidence};
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_in_order", rms_norm_in_order);
  m.impl("silu_mul", silu_mul);
  m.impl("gated", gated);
  m.impl("gated_in_order", gated_in_order);
  m.impl("gated_pairs", gated_pairs);
  m.impl("low_rank_added", low_rank_added);
  m.impl("low_rank_between", low_rank_between);
  m.impl("ordered_rows", ordered_rows);
  m.impl("hadamard_rows", hadamard_rows);
  m.impl("gated_hadamard", gated_hadamard);
  m.impl("embed_rows", embed_rows);
  m.impl("choose_rows", choose_rows);
}
