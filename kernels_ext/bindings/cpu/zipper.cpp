// How does the kernel of sparse high parts meet torch? Rows are rounded to bfloat16 here, once for all outputs.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "../../cpu/threads/parallel.h"
#include "../operands.h"
#include "../zipper_places.h"

namespace {

using namespace mlspec;
using at::Tensor;

constexpr int64_t kBlock = 32;  // a multiple of so many inputs

struct Operands {
  const void* x;
  mlspec_dtype dtype;
  int64_t rows, in, out;
  double values;  // as many as the slots have room for
  mlspec_zipper_args high;
};

// x and high are what ops/zipper.py says they are. The words themselves are trusted: prepack_zipper made them.
Operands checked(const char* op, const Tensor& x, const Tensor& low, const Tensor& high, const std::optional<Tensor>& bias) {
  Operands given{};
  given.dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) % kBlock == 0, op, ": x has shape ", x.sizes(), ", a high part has multiples of ",
                    kBlock, " inputs");
  check_dtype(op, "low", low, at::kFloat);
  check_contiguous(op, "low", low);
  const int64_t out = low.dim() ? low.size(-1) : 0;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  check_shape(op, "low", low, shape);
  check_dtype(op, "high", high, at::kInt);
  const ZipperPlaces places(x.size(-1), out);
  TORCH_CHECK_VALUE(high.dim() == 1 && high.size(0) >= places.words, op, ": high has shape ", high.sizes(), ", expected [",
                    places.words, " + words] from prepack_zipper");
  check_contiguous(op, "high", high);
  check_cpu(op, "low", low);
  check_cpu(op, "high", high);
  if (bias) {
    float_dtype(op, "bias", *bias);
    check_shape(op, "bias", *bias, {out});
    check_cpu(op, "bias", *bias);
  }
  const int32_t* const numbers = high.const_data_ptr<int32_t>();
  const int64_t slots = (high.size(0) - places.words) * 2 / MLSPEC_ZIPPER_OUTPUTS;
  given.high.step = reinterpret_cast<const float*>(numbers + places.step);
  given.high.starts = numbers + places.starts;
  given.high.words = reinterpret_cast<const int16_t*>(numbers + places.words);
  TORCH_CHECK_VALUE(given.high.starts[0] == 0 && given.high.starts[places.cells] == slots, op, ": high has ", slots,
                    " slots, its cells end at ", given.high.starts[places.cells]);
  given.values = static_cast<double>(slots * MLSPEC_ZIPPER_OUTPUTS);
  given.in = x.size(-1);
  given.out = out;
  given.rows = out ? low.numel() / out : 0;
  return given;
}

Tensor zipper_high_linear(const Tensor& x, const Tensor& low, const Tensor& high, const std::optional<Tensor>& bias) {
  constexpr const char* op = "zipper_high_linear";
  Operands given = checked(op, x, low, high, bias);
  Tensor y = at::empty(low.sizes(), x.options());
  if (y.numel() == 0) return y;
  const Tensor flat = x.contiguous(), sums = low.clone();
  const Tensor added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  given.x = flat.const_data_ptr();
  const bool rounds = given.dtype != MLSPEC_BFLOAT16;
  const int threads = threads_for(static_cast<double>(given.rows) * (given.values + static_cast<double>(given.in)));
  const Tensor wide = at::empty({rounds ? threads : 0, given.in}, at::kFloat);
  const Tensor narrow = at::empty({rounds ? given.rows : 0, given.in}, at::kBFloat16);
  float* const own = sums.mutable_data_ptr<float>();
  float* const widened = wide.mutable_data_ptr<float>();
  uint16_t* const narrowed = static_cast<uint16_t*>(narrow.mutable_data_ptr());
  const float* const bias_floats = bias ? added.const_data_ptr<float>() : nullptr;
  void* const result = y.mutable_data_ptr();
  const CpuKernels& kernels = cpu_kernels();
  mlspec_zipper_args args = given.high;
  args.x = rounds ? narrowed : static_cast<const uint16_t*>(given.x);
  args.x_stride = args.in_features = given.in;
  args.rows = given.rows;
  args.out_features = args.y_stride = given.out;
  args.y = own;
  const int64_t slices = ZipperPlaces(given.in, given.out).down;
  run(threads, [&](Team& team) {
    float* const room = widened + team.index() * given.in;
    if (rounds)
      team.share(given.rows, rows_per_piece(given.in), [&](int64_t row, int64_t end) {
        for (; row < end; ++row) {
          kernels.row.widen(bytes_at(given.x, given.dtype, row * given.in), given.dtype, 1.0f, given.in, room);
          kernels.row.narrow(room, MLSPEC_BFLOAT16, given.in, narrowed + row * given.in);
        }
      });
    team.share(slices, std::max<int64_t>(1, slices / (8 * threads)),
               [&](int64_t begin, int64_t end) { kernels.zipper_lut(&args, begin, end); });
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
