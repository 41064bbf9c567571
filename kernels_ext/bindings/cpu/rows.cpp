// How do the kernels over single rows meet torch: norm and gated activation?
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "../operands.h"
#include "../../cpu/threads/parallel.h"

namespace {

using namespace mlspec;
using at::Tensor;

// -> x normalized times weight, and x + residual (of no elements without a residual). Both rounded to x.dtype once.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual) {
  constexpr const char* op = "rms_norm";
  const mlspec_dtype dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  const int64_t n = x.size(-1);
  float_dtype(op, "weight", weight);
  check_shape(op, "weight", weight, {n});
  check_cpu(op, "weight", weight);
  if (residual) check_same(op, "residual", *residual, "x", x);
  const Tensor flat = x.contiguous(), wide_weight = weight.to(at::kFloat).contiguous();
  const Tensor other = residual ? residual->contiguous() : Tensor();
  Tensor normed = at::empty(x.sizes(), x.options());
  Tensor sum = residual ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
  if (x.numel() == 0) return {normed, sum};
  const int64_t rows = flat.numel() / n;
  const int threads = threads_for(4.0 * rows * n);
  const Tensor scratch = at::empty({threads, 2, n}, at::kFloat);
  const void *in = flat.const_data_ptr(), *add = residual ? other.const_data_ptr() : nullptr;
  void *out = normed.mutable_data_ptr(), *total = sum.mutable_data_ptr();
  const float* scales = wide_weight.const_data_ptr<float>();
  float* const rooms = scratch.mutable_data_ptr<float>();
  const mlspec_row_ops& ops = cpu_kernels().row;
  run(threads, [&](Team& team) {
    float *row = rooms + team.index() * 2 * n, *second = row + n;
    team.share(rows, rows_per_piece(n), [&](int64_t r, int64_t end) {
      for (; r < end; ++r) {
        ops.widen(bytes_at(in, dtype, r * n), dtype, 1.0f, n, row);
        if (add) {  // the norm reads the sum as it is handed on: rounded
          ops.widen(bytes_at(add, dtype, r * n), dtype, 1.0f, n, second);
          ops.add(second, n, row);
          ops.narrow(row, dtype, n, bytes_at(total, dtype, r * n));
          ops.widen(bytes_at(total, dtype, r * n), dtype, 1.0f, n, row);
        }
        ops.rms_norm(row, scales, static_cast<float>(eps), n, row);
        ops.narrow(row, dtype, n, bytes_at(out, dtype, r * n));
      }
    });
  });
  return {normed, sum};
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  constexpr const char* op = "silu_mul";
  const mlspec_dtype dtype = float_dtype(op, "gate", gate);
  check_same(op, "up", up, "gate", gate);
  Tensor y = at::empty(gate.sizes(), gate.options());
  const Tensor flat_gate = gate.contiguous(), flat_up = up.contiguous();
  const void *a = flat_gate.const_data_ptr(), *b = flat_up.const_data_ptr();
  void* out = y.mutable_data_ptr();
  constexpr int64_t kPiece = 512;
  const mlspec_row_ops& ops = cpu_kernels().row;
  const int64_t items = y.numel();
  run(threads_for(16.0 * static_cast<double>(items)), [&](Team& team) {
    team.share((items + kPiece - 1) / kPiece, kGrain / kPiece, [&](int64_t piece, int64_t end) {
      float wide_gate[kPiece], wide_up[kPiece];
      for (; piece < end; ++piece) {
        const int64_t first = piece * kPiece, n = std::min(kPiece, items - first);
        ops.widen(bytes_at(a, dtype, first), dtype, 1.0f, n, wide_gate);
        ops.widen(bytes_at(b, dtype, first), dtype, 1.0f, n, wide_up);
        ops.activate_mul(wide_gate, wide_up, MLSPEC_SILU, n, wide_gate);
        ops.narrow(wide_gate, dtype, n, bytes_at(out, dtype, first));
      }
    });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
}
