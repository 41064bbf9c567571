// How does the kernel of sparse high parts meet torch? Tables are made of the activations here; a pass takes up to eight rows.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "../../cpu/threads/parallel.h"
#include "../../cpu/zipper/zipper_tables.h"
#include "../operands.h"

namespace {

using namespace mlspec;
using at::Tensor;

constexpr int64_t kHeader = 4;  // integers in front of the rows (hf_mlspec/ops/zipper.py)

struct Operands {
  const void* x;
  mlspec_dtype dtype;
  int64_t rows, in, out;
  mlspec_zipper_args high;
};

// x and high are what ops/zipper.py says they are. The terms themselves are trusted: prepack_zipper made them.
Operands checked(const char* op, const Tensor& x, const Tensor& low, const Tensor& high, const std::optional<Tensor>& bias) {
  Operands given{};
  given.dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) % MLSPEC_ZIPPER_GROUP == 0, op, ": x has shape ", x.sizes(),
                    ", tables are made of groups of ", +MLSPEC_ZIPPER_GROUP, " inputs");
  check_dtype(op, "low", low, at::kFloat);
  check_contiguous(op, "low", low);
  const int64_t out = low.dim() ? low.size(-1) : 0;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  check_shape(op, "low", low, shape);
  check_dtype(op, "high", high, at::kInt);
  TORCH_CHECK_VALUE(high.dim() == 1 && high.size(0) >= kHeader + 2 * out + 1, op, ": high has shape ", high.sizes(), ", expected [",
                    kHeader, " + 2 * ", out, " + 1 + terms] from prepack_zipper");
  check_contiguous(op, "high", high);
  check_cpu(op, "low", low);
  check_cpu(op, "high", high);
  if (bias) {
    float_dtype(op, "bias", *bias);
    check_shape(op, "bias", *bias, {out});
    check_cpu(op, "bias", *bias);
  }
  const int32_t* const numbers = high.const_data_ptr<int32_t>() + kHeader;
  given.high.step = reinterpret_cast<const float*>(numbers);
  given.high.starts = numbers + out;
  given.high.terms = numbers + 2 * out + 1;
  TORCH_CHECK_VALUE(given.high.starts[0] == 0 && given.high.starts[out] == high.size(0) - kHeader - 2 * out - 1, op,
                    ": high has ", high.size(0) - kHeader - 2 * out - 1, " terms, its rows end at ", given.high.starts[out]);
  given.in = x.size(-1);
  given.out = out;
  given.rows = out ? low.numel() / out : 0;
  return given;
}

// One row of x, rounded to bfloat16, into its lane.
void lay_inputs(const Operands& given, int64_t row, int64_t lanes, int64_t lane, float* wide, uint16_t* narrow, float* tables) {
  const mlspec_row_ops& ops = cpu_kernels().row;
  const auto* const from = static_cast<const char*>(given.x) + row * given.in * mlspec_element_bytes(given.dtype);
  ops.widen(from, given.dtype, 1.0f, given.in, wide);
  ops.narrow(wide, MLSPEC_BFLOAT16, given.in, narrow);
  zipper_inputs(narrow, given.in, lanes, lane, tables);
}

Tensor zipper_high_linear(const Tensor& x, const Tensor& low, const Tensor& high, const std::optional<Tensor>& bias) {
  constexpr const char* op = "zipper_high_linear";
  Operands given = checked(op, x, low, high, bias);
  Tensor y = at::empty(low.sizes(), x.options());
  if (y.numel() == 0) return y;
  const Tensor flat = x.contiguous(), sums = low.clone();
  const Tensor added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  given.x = flat.const_data_ptr();
  const int64_t size = zipper_table_floats(given.in);
  const int64_t terms = given.high.starts[given.out];
  const int threads = threads_for(static_cast<double>(given.rows) * static_cast<double>(terms + size));
  const Tensor tables = at::empty({MLSPEC_ZIPPER_LANES, size}, at::kFloat);
  const Tensor wide = at::empty({threads, given.in}, at::kFloat), narrow = at::empty({threads, given.in}, at::kBFloat16);
  float* const to = tables.mutable_data_ptr<float>();
  float* const own = sums.mutable_data_ptr<float>();
  float* const widened = wide.mutable_data_ptr<float>();
  uint16_t* const narrowed = static_cast<uint16_t*>(narrow.mutable_data_ptr());
  const float* const bias_floats = bias ? added.const_data_ptr<float>() : nullptr;
  void* const result = y.mutable_data_ptr();
  const CpuKernels& kernels = cpu_kernels();
  run(threads, [&](Team& team) {
    float* const room = widened + team.index() * given.in;
    uint16_t* const small = narrowed + team.index() * given.in;
    for (int64_t first = 0; first < given.rows;) {
      const ZipperPass pass(given.rows - first);
      team.share(pass.lanes, 1, [&](int64_t lane, int64_t end) {
        for (; lane < end; ++lane) {
          if (lane < pass.rows)
            lay_inputs(given, first + lane, pass.lanes, lane, room, small, to);
          else
            zipper_no_inputs(given.in, pass.lanes, lane, to);
        }
      });
      team.share(given.in / MLSPEC_ZIPPER_GROUP, kGroupsAtOnce,
                 [&](int64_t begin, int64_t end) { zipper_tables(given.in, pass.lanes, begin, end, to); });
      mlspec_zipper_args args = given.high;
      args.tables = to;
      args.groups = given.in / MLSPEC_ZIPPER_GROUP;
      args.lanes = pass.lanes;
      args.rows = pass.rows;
      args.y = own + first * given.out;
      args.y_stride = given.out;
      team.share(given.out, std::max<int64_t>(16, given.out / (8 * threads)),
                 [&](int64_t begin, int64_t end) { kernels.zipper_lut(&args, begin, end); });
      first += pass.rows;
    }
    team.share(given.rows, rows_per_piece(given.out), [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        float* const line = own + row * given.out;
        for (int64_t i = 0; bias_floats && i < given.out; ++i) line[i] += bias_floats[i];
        kernels.row.narrow(line, given.dtype, given.out, bytes_at(result, given.dtype, row * given.out));
      }
    });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) { m.impl("zipper_high_linear", zipper_high_linear); }
