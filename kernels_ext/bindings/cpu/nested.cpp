// How do the kernels of nested BF16 weights meet torch? The exact and the draft product, and rows of a table.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "linear.h"
#include "../../cpu/threads/parallel.h"
#include "../../formats.h"

namespace {

using namespace mlspec;
using namespace mlspec::cpu_tiles;
using at::Tensor;

// The weight of both ops: everything of the arguments but codebook, activations, bias and result.
mlspec_linear_args nested_weight(const char* op, const Tensor& draft_tiles, const Tensor& exponent_tiles, const Tensor& low_tiles,
                                 int64_t out_features) {
  TORCH_CHECK_VALUE(draft_tiles.dim() == 3 && draft_tiles.size(2) == kTileBytes, op, ": draft_tiles has shape ",
                    draft_tiles.sizes(), ", expected [out / 16, in / ", kBlock, ", ", kTileBytes, "] from prepack_nested");
  const int64_t tiles = draft_tiles.size(0), steps = draft_tiles.size(1);
  TORCH_CHECK_VALUE(out_features >= 0 && round_up(out_features, kTileOutputs) == tiles, op, ": out_features is ", out_features,
                    ", draft_tiles hold ", tiles, " tiles of ", kTileOutputs);
  check_weight_part(op, "draft_tiles", draft_tiles, at::kByte, draft_tiles.sizes());
  check_weight_part(op, "exponent_tiles", exponent_tiles, at::kByte, {tiles, steps, kTileOutputs});
  check_weight_part(op, "low_tiles", low_tiles, at::kByte, {tiles, steps, kLowTileBytes});
  mlspec_linear_args args{};
  args.weight = draft_tiles.const_data_ptr();
  args.scale = exponent_tiles.const_data_ptr();
  args.low = low_tiles.const_data_ptr<uint8_t>();
  args.in_features = steps * kBlock;
  args.out_features = out_features;
  return args;
}

Form form_of(const char* op, int64_t weight_bits, int64_t activation_bits) {
  const CpuKernels& kernels = cpu_kernels();
  if (weight_bits == 16 && activation_bits == 16) return {kernels.nested_linear_exact, MLSPEC_ACTS_BF16, 0, 0};
  if (weight_bits == 4 && activation_bits == 16) return {kernels.nested_linear_bf16, MLSPEC_ACTS_BF16, 0, 0};
  TORCH_CHECK_VALUE(weight_bits == 4 && activation_bits == 8, op, ": weight_bits is ", weight_bits, " and activation_bits ",
                    activation_bits, ", choose one of 16 and 16, 4 and 16, 4 and 8");
  return {kernels.nested_linear_int8, MLSPEC_ACTS_INT, kBlock, 8};
}

Tensor nested_linear(const Tensor& x, const Tensor& draft_tiles, const Tensor& exponent_tiles, const Tensor& low_tiles,
                     const Tensor& codebook, int64_t out_features, const std::optional<Tensor>& bias, int64_t weight_bits,
                     int64_t activation_bits) {
  constexpr const char* op = "nested_linear";
  mlspec_linear_args args = nested_weight(op, draft_tiles, exponent_tiles, low_tiles, out_features);
  check_weight_part(op, "codebook", codebook, at::kByte, {kCodebookLevels});
  args.codebook = codebook.const_data_ptr<uint8_t>();
  return multiply(op, form_of(op, weight_bits, activation_bits), x, args, bias);
}

// One row: exact, times scale, rounded once. row: float [in], for this thread.
void scaled_row(const mlspec_linear_args& table, int64_t id, float scale, float* row, uint16_t* to) {
  const mlspec_row_ops& ops = cpu_kernels().row;
  mlspec_nested_row(&table, id, to);
  if (scale == 1.0f) return;
  ops.widen(to, MLSPEC_BFLOAT16, scale, table.in_features, row);
  ops.narrow(row, MLSPEC_BFLOAT16, table.in_features, to);
}

Tensor nested_rows(const Tensor& ids, const Tensor& draft_tiles, const Tensor& exponent_tiles, const Tensor& low_tiles,
                   int64_t out_features, double scale) {
  constexpr const char* op = "nested_rows";
  const mlspec_linear_args table = nested_weight(op, draft_tiles, exponent_tiles, low_tiles, out_features);
  check_dtype(op, "ids", ids, at::kInt);
  check_cpu(op, "ids", ids);
  TORCH_CHECK_VALUE(ids.dim() == 1, op, ": ids has shape ", ids.sizes(), ", expected [n]");
  TORCH_CHECK_VALUE(out_features > 0, op, ": out_features is ", out_features, ", a table has 1 row or more");
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": scale is ", scale, ", expected a finite number (1.0: the rows as they are)");
  const int64_t in = table.in_features, n = ids.size(0);
  Tensor rows = at::empty({n, in}, draft_tiles.options().dtype(at::kBFloat16));
  if (rows.numel() == 0) return rows;
  cpu_kernels();  // may throw, which a parallel region must not
  const Tensor flat = ids.contiguous();
  const int threads = threads_for(static_cast<double>(n) * in);
  const Tensor wide = at::empty({threads, in}, at::kFloat);
  const int32_t* const which = flat.const_data_ptr<int32_t>();
  uint16_t* const to = static_cast<uint16_t*>(rows.mutable_data_ptr());
  float* const own = wide.mutable_data_ptr<float>();
  run(threads, [&](Team& team) {
    team.share(n, rows_per_piece(in), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t id = std::clamp<int64_t>(which[i], 0, out_features - 1);
        scaled_row(table, id, static_cast<float>(scale), own + team.index() * in, to + i * in);
      }
    });
  });
  return rows;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) {
  m.impl("nested_linear", nested_linear);
  m.impl("nested_rows", nested_rows);
}
