// How do the linear kernels meet torch? Check the operands, pack the activations, hand out output features to threads.
// The schemas are Python's (hf_mlspec/ops, a file a family); this file holds no Python symbol.
#include "linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "../../cpu/threads/parallel.h"
#include "../../formats.h"

namespace {

using namespace mlspec;
using namespace mlspec::cpu_tiles;
using at::Tensor;

constexpr int64_t kRowsPerPass = 512;  // bounds the scratch of a long prompt; a row's bits do not depend on it
constexpr int64_t kPackColumns = 1024;  // of a piece of packing: a multiple of 32 and of every group

// Rows [0, acts.num_rows) of x in dtype: widened, then packed, in pieces of 16 rows and kPackColumns elements. The last
// `again` elements of a row of x stand in the activations twice.
void pack(const CpuKernels& kernels, Team& team, const void* x, mlspec_dtype dtype, float* wide, const mlspec_acts& acts,
          int64_t again) {
  const int64_t n = acts.num_rows, in = acts.in_features, columns = round_up(in, kPackColumns), given = in - again;
  const bool copies = dtype != MLSPEC_FLOAT32 || again;
  const mlspec_pack_args args{copies ? wide : static_cast<const float*>(x), in, &acts};
  const auto widen = [&](int64_t row, int64_t k, int64_t k_end, int64_t from) {
    const void* const source = bytes_at(x, dtype, row * given + from);
    float* const to = wide + row * in + k;
    if (k >= k_end) return;
    if (dtype == MLSPEC_FLOAT32) std::memcpy(to, source, (k_end - k) * sizeof(float));
    else kernels.row.widen(source, dtype, 1.0f, k_end - k, to);
  };
  team.share(round_up(n, 16) * columns, 1, [&](int64_t piece, int64_t end) {
    for (; piece < end; ++piece) {
      const int64_t row = piece / columns * 16, last_row = std::min(row + 16, n);
      const int64_t k = piece % columns * kPackColumns, last_k = std::min(k + kPackColumns, in);
      const int64_t second = std::clamp(given, k, last_k);  // where what is there twice begins for the second time
      for (int64_t r = row; copies && r < last_row; ++r) {
        widen(r, k, second, k);
        widen(r, second, last_k, second - again);
      }
      kernels.pack_rows(&args, row, last_row, k, last_k);
    }
  });
}

void multiply_rows(const Form& form, mlspec_linear_args args, const void* x, mlspec_dtype dtype, int64_t rows, void* y) {
  const int64_t in = args.in_features, out = args.out_features;
  const bool wide = dtype == MLSPEC_FLOAT32;
  mlspec_acts acts{form.kind, rows, in, form.group, form.bits, nullptr, 2 * form.outliers, static_cast<float>(form.clip)};
  const Tensor packed = at::empty({mlspec_acts_bytes(&acts)}, at::kByte);
  const Tensor wide_x = at::empty({wide && !form.outliers ? 0 : rows * in}, at::kFloat);
  const Tensor wide_y = at::empty({wide ? 0 : rows * out}, at::kFloat);
  acts.data = packed.mutable_data_ptr();
  args.acts = &acts;
  args.y = wide ? static_cast<float*>(y) : wide_y.mutable_data_ptr<float>();
  args.y_stride = out;
  const double work = static_cast<double>(rows) * in * out;
  const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(kWorkPerThread / 2 / (16.0 * in * rows)));
  float* const widened = wide_x.mutable_data_ptr<float>();
  const CpuKernels& kernels = cpu_kernels();
  run(threads_for(work), [&](Team& team) {
    pack(kernels, team, x, dtype, widened, acts, form.outliers);
    team.share(round_up(out, kTileOutputs), grain, [&](int64_t begin, int64_t end) {
      form.kernel(&args, begin * kTileOutputs, std::min(end * kTileOutputs, out));
    });
    if (wide) return;
    team.share(round_up(rows * out, kPackColumns), 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kPackColumns, last = std::min(end * kPackColumns, rows * out);
      kernels.row.narrow(args.y + first, dtype, last - first, bytes_at(y, dtype, first));
    });
  });
}

}  // namespace

namespace mlspec {

Tensor multiply(const char* op, const Form& form, const Tensor& x, mlspec_linear_args args, const std::optional<Tensor>& bias) {
  const mlspec_dtype dtype = float_dtype(op, "x", x);
  const int64_t in = args.in_features - form.outliers, out = args.out_features;
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == in, op, ": x has shape ", x.sizes(), ", the weight takes in_features = ", in);
  if (bias) {
    float_dtype(op, "bias", *bias);
    check_shape(op, "bias", *bias, {out});
    check_cpu(op, "bias", *bias);
  }
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  Tensor y = at::empty(shape, x.options());
  if (y.numel() == 0) return y;
  if (in == 0) return bias ? y.copy_(bias->expand(shape)) : y.zero_();
  const Tensor flat = x.contiguous(), wide_bias = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  args.bias = bias ? wide_bias.const_data_ptr<float>() : nullptr;
  const int64_t rows = flat.numel() / in;
  for (int64_t first = 0; first < rows; first += kRowsPerPass)
    multiply_rows(form, args, bytes_at(flat.const_data_ptr(), dtype, first * in), dtype, std::min(kRowsPerPass, rows - first),
                  bytes_at(y.mutable_data_ptr(), dtype, first * out));
  return y;
}

void check_weight_part(const char* op, const char* name, const Tensor& t, at::ScalarType dtype, at::IntArrayRef shape) {
  check_dtype(op, name, t, dtype);
  check_shape(op, name, t, shape);
  check_cpu(op, name, t);
  check_contiguous(op, name, t);
  check_aligned(op, name, t, static_cast<int64_t>(t.element_size()));
}

}  // namespace mlspec

namespace {

// weight_tiles of both 4-bit formats -> in_features.
int64_t check_tiles(const char* op, const Tensor& tiles, int64_t out_features) {
  check_dtype(op, "weight_tiles", tiles, at::kByte);
  TORCH_CHECK_VALUE(tiles.dim() == 3 && tiles.size(2) == kTileBytes, op, ": weight_tiles has shape ", tiles.sizes(),
                    ", expected [out / 16, in / ", kBlock, ", ", kTileBytes, "] from prepack");
  const int64_t count = tiles.size(0);
  TORCH_CHECK_VALUE(out_features >= 0 && round_up(out_features, kTileOutputs) == count, op, ": out_features is ", out_features,
                    ", weight_tiles hold ", count, " tiles of ", kTileOutputs);
  return tiles.size(1) * kBlock;
}

Tensor mxfp4_linear(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, int64_t out_features,
                    const std::optional<Tensor>& bias, int64_t activation_bits) {
  constexpr const char* op = "mxfp4_linear";
  const int64_t in = check_tiles(op, weight_tiles, out_features);
  check_weight_part(op, "weight_tiles", weight_tiles, at::kByte, weight_tiles.sizes());
  check_weight_part(op, "scale_tiles", scale_tiles, at::kByte, {weight_tiles.size(0), weight_tiles.size(1), kTileOutputs});
  check_one_of(op, "activation_bits", activation_bits, {8, 16});
  mlspec_linear_args args{};
  args.weight = weight_tiles.const_data_ptr();
  args.scale = scale_tiles.const_data_ptr();
  args.in_features = in;
  args.out_features = out_features;
  const CpuKernels& kernels = cpu_kernels();
  const Form form = activation_bits == 8 ? Form{kernels.mxfp4_linear_int8, MLSPEC_ACTS_INT, kBlock, 8}
                                         : Form{kernels.mxfp4_linear_bf16, MLSPEC_ACTS_BF16, 0, 0};
  return multiply(op, form, x, args, bias);
}

// The weight of an int4 op: everything of the arguments but activations, bias and result.
mlspec_linear_args int4_weight(const char* op, const Tensor& weight_tiles, const Tensor& scale_tiles,
                               const std::optional<Tensor>& zero_tiles, int64_t out_features, int64_t group_size) {
  const int64_t in = check_tiles(op, weight_tiles, out_features);
  check_one_of(op, "group_size", group_size, kGroupSizes);
  TORCH_CHECK_VALUE(in % group_size == 0, op, ": group_size ", group_size, " does not divide in_features = ", in);
  const int64_t groups[] = {weight_tiles.size(0), in / group_size, kTileOutputs};
  check_weight_part(op, "weight_tiles", weight_tiles, at::kByte, weight_tiles.sizes());
  check_weight_part(op, "scale_tiles", scale_tiles, at::kHalf, groups);
  if (zero_tiles) check_weight_part(op, "zero_tiles", *zero_tiles, at::kByte, groups);
  mlspec_linear_args args{};
  args.weight = weight_tiles.const_data_ptr();
  args.scale = scale_tiles.const_data_ptr();
  args.zero = zero_tiles ? zero_tiles->const_data_ptr<uint8_t>() : nullptr;
  args.group = group_size;
  args.in_features = in;
  args.out_features = out_features;
  return args;
}

Tensor int4_linear(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles,
                   const std::optional<Tensor>& zero_tiles, int64_t out_features, const std::optional<Tensor>& bias,
                   int64_t group_size, int64_t activation_bits, double activation_clip) {
  constexpr const char* op = "int4_linear";
  const mlspec_linear_args args = int4_weight(op, weight_tiles, scale_tiles, zero_tiles, out_features, group_size);
  check_one_of(op, "activation_bits", activation_bits, {4, 8, 16});
  check_activation_clip(op, activation_clip);
  const CpuKernels& kernels = cpu_kernels();
  const Form form = activation_bits == 16
                        ? Form{kernels.int4_linear_bf16, MLSPEC_ACTS_BF16, 0, 0}
                        : Form{kernels.int4_linear_int8, MLSPEC_ACTS_INT, group_size, activation_bits, 0, activation_clip};
  return multiply(op, form, x, args, bias);
}

// The tiles have two groups for the int8 columns of kOutliers inputs: the high nibbles of all, then the low ones.
Tensor int4_int8_linear(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, int64_t out_features,
                        const std::optional<Tensor>& bias, int64_t activation_bits, double activation_clip) {
  constexpr const char* op = "int4_int8_linear";
  const mlspec_linear_args args = int4_weight(op, weight_tiles, scale_tiles, std::nullopt, out_features, kOutliers);
  TORCH_CHECK_VALUE(args.in_features >= 3 * kOutliers, op, ": weight_tiles have ", args.in_features, " columns, expected ",
                    3 * kOutliers, " or more: in_features and ", kOutliers, " outliers again");
  check_one_of(op, "activation_bits", activation_bits, {4, 8, 16});
  check_activation_clip(op, activation_clip);
  const CpuKernels& kernels = cpu_kernels();
  const Form form =
      activation_bits == 16
          ? Form{kernels.int4_linear_bf16, MLSPEC_ACTS_BF16, 0, 0, kOutliers}
          : Form{kernels.int4_linear_int8, MLSPEC_ACTS_INT, kOutliers, activation_bits, kOutliers, activation_clip};
  return multiply(op, form, x, args, bias);
}

Tensor int4_dequantize(const Tensor& weight_tiles, const Tensor& scale_tiles, const std::optional<Tensor>& zero_tiles,
                       int64_t out_features, int64_t group_size) {
  const mlspec_linear_args args =
      int4_weight("int4_dequantize", weight_tiles, scale_tiles, zero_tiles, out_features, group_size);
  const int64_t in = args.in_features;
  Tensor dense = at::empty({out_features, in}, weight_tiles.options().dtype(at::kBFloat16));
  if (dense.numel() == 0) return dense;
  const CpuKernels& kernels = cpu_kernels();
  uint16_t* const rows = static_cast<uint16_t*>(dense.mutable_data_ptr());
  const double work = static_cast<double>(out_features) * in;
  const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(kWorkPerThread / (16.0 * in)));
  run(threads_for(work), [&](Team& team) {
    team.share(round_up(out_features, kTileOutputs), grain, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kTileOutputs;
      kernels.int4_dequantize(&args, first, std::min(end * kTileOutputs, out_features), rows + first * in);
    });
  });
  return dense;
}

Tensor dense_linear(const char* op, const Form& form, at::ScalarType dtype, const Tensor& x, const Tensor& weight,
                    const std::optional<Tensor>& bias) {
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight has shape ", weight.sizes(), ", expected [out, in]");
  check_weight_part(op, "weight", weight, dtype, weight.sizes());
  mlspec_linear_args args{};
  args.weight = weight.const_data_ptr();
  args.in_features = weight.size(1);
  args.out_features = weight.size(0);
  return multiply(op, form, x, args, bias);
}

Tensor bf16_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const CpuKernels& kernels = cpu_kernels();
  return dense_linear("bf16_linear", {kernels.bf16_linear, kernels.bf16_linear_acts, 0, 0}, at::kBFloat16, x, weight, bias);
}

Tensor f32_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return dense_linear("f32_linear", {cpu_kernels().f32_linear, MLSPEC_ACTS_F32, 0, 0}, at::kFloat, x, weight, bias);
}

std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x, int64_t group_size, int64_t bits, double activation_clip) {
  constexpr const char* op = "quantize_rows";
  const mlspec_dtype dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  check_one_of(op, "group_size", group_size, kGroupSizes);
  check_one_of(op, "bits", bits, {4, 8});
  check_activation_clip(op, activation_clip);
  const int64_t in = x.size(-1), groups = round_up(in, group_size);
  std::vector<int64_t> shape = x.sizes().vec();
  Tensor codes = at::empty(shape, x.options().dtype(at::kChar));
  shape.back() = groups;
  Tensor scales = at::empty(shape, x.options().dtype(at::kFloat));
  if (x.numel() == 0) return {codes, scales};
  const CpuKernels& kernels = cpu_kernels();  // may throw, which a parallel region must not
  const Tensor flat = x.contiguous();
  const int64_t rows = flat.numel() / in;
  for (int64_t first = 0; first < rows; first += kRowsPerPass) {
    mlspec_acts acts{MLSPEC_ACTS_INT, std::min(kRowsPerPass, rows - first), in, group_size, bits, nullptr};
    acts.clip = static_cast<float>(activation_clip);
    const int64_t n = acts.num_rows;
    const Tensor packed = at::empty({mlspec_acts_bytes(&acts)}, at::kByte), wide = at::empty({n * in}, at::kFloat);
    acts.data = packed.mutable_data_ptr();
    float* const widened = wide.mutable_data_ptr<float>();
    run(threads_for(static_cast<double>(n) * in), [&](Team& team) {
      pack(kernels, team, bytes_at(flat.const_data_ptr(), dtype, first * in), dtype, widened, acts, 0);
    });
    std::memcpy(codes.mutable_data_ptr<int8_t>() + first * in, mlspec_acts_codes(&acts), n * in);
    std::memcpy(scales.mutable_data_ptr<float>() + first * groups, mlspec_acts_scales(&acts), n * groups * sizeof(float));
  }
  return {codes, scales};
}

std::string cpu_isa() { return cpu_kernels().isa; }

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CPU, m) {
  m.impl("mxfp4_linear", mxfp4_linear);
  m.impl("int4_linear", int4_linear);
  m.impl("int4_int8_linear", int4_int8_linear);
  m.impl("int4_dequantize", int4_dequantize);
  m.impl("bf16_linear", bf16_linear);
  m.impl("f32_linear", f32_linear);
  m.impl("quantize_rows", quantize_rows);
}

TORCH_LIBRARY_IMPL(mlspec, CompositeExplicitAutograd, m) { m.impl("cpu_isa", cpu_isa); }
