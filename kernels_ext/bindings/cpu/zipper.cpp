// How do the kernels of sparse high parts, and of embeddings in two parts, meet torch? Rows are rounded to bfloat16 here, once for all outputs.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../../cpu/threads/parallel.h"
#include "../operands.h"
#include "../zipper_places.h"
#include "zipper_table.h"

namespace {

using namespace mlspec;
using at::Tensor;

constexpr int64_t kBlock = 32;  // a multiple of so many inputs

// The high part of a weight: what the kernel reads of it, as many values as its slots have room for, its slices of outputs.
struct High {
  mlspec_zipper_args args{};
  double values = 0;
  int64_t slices = 0;
};

// high is what ops/zipper.py says it is. The words themselves are trusted: prepack_zipper made them.
High checked_high(const char* op, const Tensor& high, int64_t in, int64_t out) {
  check_dtype(op, "high", high, at::kInt);
  const ZipperPlaces places(in, out);
  TORCH_CHECK_VALUE(high.dim() == 1 && high.size(0) >= places.words, op, ": high has shape ", high.sizes(), ", expected [",
                    places.words, " + words] from prepack_zipper");
  check_contiguous(op, "high", high);
  check_cpu(op, "high", high);
  const int32_t* const numbers = high.const_data_ptr<int32_t>();
  const int64_t slots = (high.size(0) - places.words) * 2 / MLSPEC_ZIPPER_OUTPUTS;
  High found;
  found.args.step = reinterpret_cast<const float*>(numbers + places.step);
  found.args.starts = numbers + places.starts;
  found.args.words = reinterpret_cast<const int16_t*>(numbers + places.words);
  TORCH_CHECK_VALUE(found.args.starts[0] == 0 && found.args.starts[places.cells] == slots, op, ": high has ", slots,
                    " slots, its cells end at ", found.args.starts[places.cells]);
  found.args.in_features = in;
  found.args.out_features = out;
  found.values = static_cast<double>(slots * MLSPEC_ZIPPER_OUTPUTS);
  found.slices = places.down;
  return found;
}

void check_x(const char* op, const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) % kBlock == 0, op, ": x has shape ", x.sizes(), ", a high part has multiples of ",
                    kBlock, " inputs");
}

int threads_of(const High& high, int64_t rows) {
  return threads_for(static_cast<double>(rows) * (high.values + static_cast<double>(high.args.in_features)));
}

int64_t slices_per_piece(const High& high, int threads) { return std::max<int64_t>(1, high.slices / (8 * threads)); }

Tensor zipper_high_linear(const Tensor& x, const Tensor& low, const Tensor& high, const std::optional<Tensor>& bias) {
  constexpr const char* op = "zipper_high_linear";
  const mlspec_dtype dtype = float_dtype(op, "x", x);
  check_x(op, x);
  check_dtype(op, "low", low, at::kFloat);
  check_contiguous(op, "low", low);
  const int64_t in = x.size(-1), out = low.dim() ? low.size(-1) : 0, rows = out ? low.numel() / out : 0;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  check_shape(op, "low", low, shape);
  check_cpu(op, "low", low);
  const High own_high = checked_high(op, high, in, out);
  if (bias) {
    float_dtype(op, "bias", *bias);
    check_shape(op, "bias", *bias, {out});
    check_cpu(op, "bias", *bias);
  }
  Tensor y = at::empty(low.sizes(), x.options());
  if (y.numel() == 0) return y;
  const Tensor flat = x.contiguous(), sums = low.clone();
  const Tensor added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const void* const given = flat.const_data_ptr();
  const bool rounds = dtype != MLSPEC_BFLOAT16;
  const int threads = threads_of(own_high, rows);
  const Tensor wide = at::empty({rounds ? threads : 0, in}, at::kFloat);
  const Tensor narrow = at::empty({rounds ? rows : 0, in}, at::kBFloat16);
  float* const own = sums.mutable_data_ptr<float>();
  float* const widened = wide.mutable_data_ptr<float>();
  uint16_t* const narrowed = static_cast<uint16_t*>(narrow.mutable_data_ptr());
  const float* const bias_floats = bias ? added.const_data_ptr<float>() : nullptr;
  void* const result = y.mutable_data_ptr();
  const CpuKernels& kernels = cpu_kernels();
  mlspec_zipper_args args = own_high.args;
  args.x = rounds ? narrowed : static_cast<const uint16_t*>(given);
  args.x_stride = in;
  args.rows = rows;
  args.y_stride = out;
  args.y = own;
  run(threads, [&](Team& team) {
    float* const room = widened + team.index() * in;
    if (rounds)
      team.share(rows, rows_per_piece(in), [&](int64_t row, int64_t end) {
        for (; row < end; ++row) {
          kernels.row.widen(bytes_at(given, dtype, row * in), dtype, 1.0f, in, room);
          kernels.row.narrow(room, MLSPEC_BFLOAT16, in, narrowed + row * in);
        }
      });
    team.share(own_high.slices, slices_per_piece(own_high, threads),
               [&](int64_t begin, int64_t end) { kernels.zipper_lut(&args, begin, end); });
    team.share(rows, rows_per_piece(out), [&](int64_t row, int64_t end) {
      for (; row < end; ++row) {
        float* const line = own + row * out;
        for (int64_t i = 0; bias_floats && i < out; ++i) line[i] += bias_floats[i];
        kernels.row.narrow(line, dtype, out, bytes_at(result, dtype, row * out));
      }
    });
  });
  return y;
}

// What a worker adds for a GPU: nothing but the kernel touches the numbers, so that no other pool of threads wakes.
void zipper_high_sums(const Tensor& x, const Tensor& high, const Tensor& sums) {
  constexpr const char* op = "zipper_high_sums";
  check_dtype(op, "x", x, at::kBFloat16);
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, in]");
  check_x(op, x);
  check_contiguous(op, "x", x);
  check_dtype(op, "sums", sums, at::kFloat);
  TORCH_CHECK_VALUE(sums.dim() == 2 && sums.size(0) == x.size(0), op, ": sums has shape ", sums.sizes(), ", expected [", x.size(0),
                    ", out]");
  TORCH_CHECK_VALUE(sums.stride(1) == 1, op, ": sums of shape ", sums.sizes(), " has strides ", sums.strides(),
                    ", the last must be 1");
  check_cpu(op, "x", x);
  check_cpu(op, "sums", sums);
  const int64_t rows = x.size(0), out = sums.size(1), stride = sums.stride(0);
  const High own = checked_high(op, high, x.size(1), out);
  if (sums.numel() == 0) return;
  mlspec_zipper_args args = own.args;
  args.x = static_cast<const uint16_t*>(x.const_data_ptr());
  args.x_stride = x.size(1);
  args.rows = rows;
  args.y = sums.mutable_data_ptr<float>();
  args.y_stride = stride;
  const int threads = threads_of(own, rows);
  const CpuKernels& kernels = cpu_kernels();
  run(threads, [&](Team& team) {
    team.share(own.slices, slices_per_piece(own, threads), [&](int64_t begin, int64_t end) {
      const int64_t first = begin * MLSPEC_ZIPPER_OUTPUTS, last = std::min<int64_t>(out, end * MLSPEC_ZIPPER_OUTPUTS);
      for (int64_t row = 0; row < rows; ++row) std::fill(args.y + row * stride + first, args.y + row * stride + last, 0.0f);
      kernels.zipper_lut(&args, begin, end);
    });
  });
}

Tensor zipper_rows(const Tensor& ids, const Tensor& planes, const Tensor& step, const Tensor& places, int64_t lowest, double scale) {
  constexpr const char* op = "zipper_rows";
  const CodeRows sizes = checked_code_rows(op, ids, planes, step, places, lowest, scale);
  for (const auto& [name, part] : {std::pair{"ids", &ids}, {"planes", &planes}, {"step", &step}, {"places", &places}})
    check_cpu(op, name, *part);
  const ZipperTable table = table_of_codes(sizes, planes, step, places, lowest);
  const int64_t n = ids.size(0), width = sizes.width;
  Tensor rows = at::empty({n, width}, planes.options().dtype(at::kBFloat16));
  if (rows.numel() == 0) return rows;
  const mlspec_row_ops& kernels = cpu_kernels().row;  // may throw, which a parallel region must not
  const int threads = threads_for(static_cast<double>(n) * width);
  const Tensor wide = at::empty({threads, width}, at::kFloat);
  const int32_t* const which = ids.const_data_ptr<int32_t>();
  uint16_t* const to = static_cast<uint16_t*>(rows.mutable_data_ptr());
  float* const all = wide.mutable_data_ptr<float>();
  run(threads, [&](Team& team) {
    team.share(n, rows_per_piece(width), [&](int64_t i, int64_t end) {
      float* const own = all + team.index() * width;
      for (; i < end; ++i) {
        zipper_row(table, std::clamp<int64_t>(which[i], 0, sizes.rows - 1), own);
        kernels.narrow(own, MLSPEC_BFLOAT16, width, to + i * width);
        if (scale == 1.0) continue;
        kernels.widen(to + i * width, MLSPEC_BFLOAT16, static_cast<float>(scale), width, own);
        kernels.narrow(own, MLSPEC_BFLOAT16, width, to + i * width);
      }
    });
  });
  return rows;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) {
  m.impl("zipper_high_linear", zipper_high_linear);
  m.impl("zipper_high_sums", zipper_high_sums);
  m.impl("zipper_rows", zipper_rows);
}
