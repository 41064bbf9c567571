// How do the linear kernels of GPUs meet torch? Check the operands, choose Hopper's kernels or those for every GPU, enqueue.
// The schemas are Python's (hf_mlspec/ops, a file a family), tiles are drawn in hf_mlspec/ops/tiles_cuda.py.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "linear.h"
#include "low_rank.h"
#include "../../cuda/portable/portable_linear.h"

#define MLSPEC_TEXT_OF(value) #value
#define MLSPEC_TEXT(value) MLSPEC_TEXT_OF(value)

namespace mlspec {

// Read out of the file by hf_mlspec/ops/cuda_library.py, before the library is loaded.
extern const char kBuiltFor[];
__attribute__((used)) const char kBuiltFor[] = "hf_mlspec CUDA toolkit=" MLSPEC_TEXT(CUDART_VERSION) " archs=" MLSPEC_CUDA_ARCHS "\n";

}  // namespace mlspec

namespace {

using namespace mlspec;
using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kAlignment = 16;

#if MLSPEC_HOPPER
constexpr LinearKernel kHopperBf16 = mlspec_cuda_bf16_linear, kHopperInt4 = mlspec_cuda_int4_linear,
                 kHopperMxfp4 = mlspec_cuda_mxfp4_linear;
#else
constexpr LinearKernel kHopperBf16 = nullptr, kHopperInt4 = nullptr, kHopperMxfp4 = nullptr;
#endif

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment == 0; }

// x [rows, in] in bfloat16, dense, at an address the kernels read 16 bytes from at once.
Tensor bf16_rows(const Tensor& x, int64_t in) {
  Tensor rows = x.to(at::kBFloat16).reshape({-1, in}).contiguous();
  return is_aligned(rows) ? rows : rows.clone();
}

// Of many tokens times a bfloat16 weight, until the linear is enqueued.
Tensor room_for_sums(const LinearWeight& weight, const Tensor& x) {
#if MLSPEC_HOPPER
  if (weight.hopper == kHopperBf16)
    if (const int64_t bytes = mlspec_cuda_bf16_partial_bytes(&weight.args)) return at::empty({bytes}, x.options().dtype(at::kByte));
#endif
  return {};
}

}  // namespace

namespace mlspec {

CodesRoom room_for_codes(const CudaCall& call, const Tensor& like, int64_t rows, int64_t in, const CodesOf& how) {
  const int64_t stride = round_up(rows, 4);
  CodesRoom room;
  room.codes = at::empty({rows, in}, like.options().dtype(at::kChar));
  room.scales = at::empty({round_up(in, kPairInputs) / how.group_size, stride}, like.options().dtype(at::kFloat));
  mlspec_cuda_quantize& args = room.args;
  args.codes = room.codes.mutable_data_ptr();
  args.scales = room.scales.mutable_data_ptr<float>();
  args.num_tokens = rows;
  args.in_features = in;
  args.scale_stride = stride;
  args.group_size = static_cast<int32_t>(how.group_size);
  args.bits = static_cast<int32_t>(how.bits);
  args.outliers = static_cast<int32_t>(how.outliers);
  args.clip = static_cast<float>(how.clip);
  args.for_linear = 1;
  args.overlap = call.overlap();
  args.stream = call.stream();
  return room;
}

std::tuple<Tensor, Tensor> quantized(const CudaCall& call, const Tensor& x, int64_t group, int64_t bits, mlspec_cuda_linear& args) {
  CodesRoom room = room_for_codes(call, x, x.size(0), x.size(1), {group, bits, args.outliers, args.activation_clip});
  room.args.x = x.const_data_ptr();
  call.check(mlspec_cuda_quantize_rows(&room.args));
  args.x_scale_stride = room.args.scale_stride;
  args.x = room.args.codes;
  args.x_scales = room.args.scales;
  return {room.codes, room.scales};
}

void check_linear_x(const char* op, const Tensor& x, const char* weight_name, const Tensor& weight, int64_t in, const Maybe& bias,
                    int64_t out) {
  float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == in, op, ": x has shape ", x.sizes(), ", the weight takes in_features = ", in);
  check_device(op, weight_name, weight, "x", x);
  if (!bias) return;
  float_dtype(op, "bias", *bias);
  check_shape(op, "bias", *bias, {out});
  check_device(op, "bias", *bias, "x", x);
}

namespace {

// args.x is there; y [tokens, out] in bfloat16 or float32.
void enqueue(const CudaCall& call, LinearWeight& weight, const Maybe& bias, const Tensor& y) {
  mlspec_cuda_linear& args = weight.args;
  const bool bias_is_bf16 = bias && bias->scalar_type() == at::kBFloat16;
  const Tensor own_bias = !bias ? Tensor() : bias_is_bf16 ? bias->contiguous() : bias->to(at::kFloat).contiguous();
  args.bias = bias ? own_bias.const_data_ptr() : nullptr;
  args.bias_is_float32 = !bias_is_bf16;
  args.out = y.mutable_data_ptr();
  args.overlap = weight.may_overlap && call.overlap();
  args.stream = call.stream();
  const bool hopper = weight.fits_hopper && hopper_serves(call.capability());
  const Tensor partial = hopper ? room_for_sums(weight, y) : Tensor();
  if (partial.defined()) args.partial = partial.mutable_data_ptr();
  call.check((hopper ? weight.hopper : weight.portable)(&args));
}

}  // namespace

Tensor multiply(const CudaCall& call, LinearWeight weight, const Tensor& x, const Maybe& bias) {
  mlspec_cuda_linear& args = weight.args;
  const int64_t in = args.in_features - args.outliers, out = args.out_features;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  const at::ScalarType result = args.out_is_float32 ? at::kFloat : x.scalar_type();
  const Tensor y = at::empty(shape, x.options().dtype(args.out_is_float32 ? at::kFloat : at::kBFloat16));
  if (y.numel() == 0) return y.to(result);
  if (in == 0) return (bias ? y.copy_(bias->expand(shape)) : y.zero_()).to(result);
  const Tensor rows = bf16_rows(x, in);
  std::tuple<Tensor, Tensor> codes;
  args.num_tokens = rows.size(0);
  args.x = rows.const_data_ptr();
  if (args.activation_bits != 16) codes = quantized(call, rows, args.group_size, args.activation_bits, args);
  enqueue(call, weight, bias, y);
  return y.to(result);
}

}  // namespace mlspec

namespace {

// weight_tiles of a 4-bit weight, whose scale_tiles tell in_features.
mlspec_cuda_linear check_tiles(const char* op, const Tensor& tiles, const Tensor& scale_tiles, int64_t out, int64_t group,
                               int64_t bytes_of_scales) {
  check_dtype(op, "weight_tiles", tiles, at::kByte);
  TORCH_CHECK_VALUE(scale_tiles.dim() == 3, op, ": scale_tiles has shape ", scale_tiles.sizes(), ", expected 3 axes from prepack");
  const int64_t in = scale_tiles.size(1) * group, pairs = round_up(std::max<int64_t>(out, 0), kPairOutputs) / kPairOutputs;
  const int64_t chunks = round_up(in, kPairInputs) / kPairInputs;
  const int64_t bytes = kPairOutputs * kPairInputs / 2 + kPairOutputs * (kPairInputs / group) * bytes_of_scales;
  const int64_t expected[] = {pairs, chunks, bytes};
  TORCH_CHECK_VALUE(out >= 0 && tiles.sizes() == at::IntArrayRef(expected), op, ": weight_tiles has shape ", tiles.sizes(),
                    ", expected ", at::IntArrayRef(expected), " from prepack on a GPU for out_features = ", out,
                    ", in_features = ", in, ", groups of ", group);
  check_part(op, "weight_tiles", tiles, at::kByte, expected, "weight_tiles", tiles);
  mlspec_cuda_linear args{};
  args.tiles = tiles.const_data_ptr();
  args.in_features = in;
  args.out_features = out;
  args.group_size = static_cast<int32_t>(group);
  return args;
}

Tensor mxfp4_linear(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, int64_t out_features, const Maybe& bias,
                    int64_t activation_bits) {
  constexpr const char* op = "mxfp4_linear";
  mlspec_cuda_linear args = check_tiles(op, weight_tiles, scale_tiles, out_features, kBlock, 1);
  check_part(op, "scale_tiles", scale_tiles, at::kByte, {1, scale_tiles.size(1), 4}, "weight_tiles", weight_tiles, 4);
  check_one_of(op, "activation_bits", activation_bits, {8, 16});
  check_linear_x(op, x, "weight_tiles", weight_tiles, args.in_features, bias, out_features);
  args.exponent_shift = static_cast<const int32_t*>(scale_tiles.const_data_ptr());
  args.activation_bits = static_cast<int32_t>(activation_bits);
  return multiply(CudaCall(op, x), {op, args, kHopperMxfp4, mlspec_cuda_portable_mxfp4_linear, true}, x, bias);
}

// sums: float32, as they are before the last rounding.
Tensor int4_product(const char* op, const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, const Maybe& zero_tiles,
                    int64_t out_features, const Maybe& bias, int64_t group_size, int64_t activation_bits, double activation_clip,
                    bool sums) {
  check_one_of(op, "group_size", group_size, kGroupSizes);
  mlspec_cuda_linear args = check_tiles(op, weight_tiles, scale_tiles, out_features, group_size, zero_tiles ? 3 : 2);
  const int64_t groups[] = {0, scale_tiles.size(1), 16};
  check_part(op, "scale_tiles", scale_tiles, at::kHalf, groups, "weight_tiles", weight_tiles);
  if (zero_tiles) check_part(op, "zero_tiles", *zero_tiles, at::kByte, groups, "weight_tiles", weight_tiles);
  check_one_of(op, "activation_bits", activation_bits, {4, 8, 16});
  check_activation_clip(op, activation_clip);
  check_linear_x(op, x, "weight_tiles", weight_tiles, args.in_features, bias, out_features);
  args.has_zeros = zero_tiles.has_value();
  args.activation_bits = static_cast<int32_t>(activation_bits);
  args.activation_clip = static_cast<float>(activation_clip);
  args.out_is_float32 = sums;
  return multiply(CudaCall(op, x), {op, args, kHopperInt4, mlspec_cuda_portable_int4_linear, true}, x, bias);
}

Tensor int4_linear(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, const Maybe& zero_tiles,
                   int64_t out_features, const Maybe& bias, int64_t group_size, int64_t activation_bits, double activation_clip) {
  return int4_product("int4_linear", x, weight_tiles, scale_tiles, zero_tiles, out_features, bias, group_size, activation_bits,
                      activation_clip, false);
}

Tensor int4_sums(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, const Maybe& zero_tiles, int64_t out_features,
                 int64_t group_size, int64_t activation_bits) {
  return int4_product("int4_sums", x, weight_tiles, scale_tiles, zero_tiles, out_features, {}, group_size, activation_bits, 1.0, true);
}

// codes [n, in] and scales as mlspec_cuda_quantize_rows writes them for a linear.
Tensor int4_codes_linear(const Tensor& codes, const Tensor& scales, const Tensor& weight_tiles, const Tensor& scale_tiles,
                         const Maybe& zero_tiles, int64_t out_features, const Maybe& bias, int64_t group_size, int64_t outliers) {
  constexpr const char* op = "int4_codes_linear";
  check_one_of(op, "group_size", group_size, kGroupSizes);
  check_one_of(op, "outliers", outliers, {0, kOutliers});
  mlspec_cuda_linear args = check_tiles(op, weight_tiles, scale_tiles, out_features, group_size, zero_tiles ? 3 : 2);
  const int64_t groups[] = {0, scale_tiles.size(1), 16}, in = args.in_features - outliers;
  check_part(op, "scale_tiles", scale_tiles, at::kHalf, groups, "weight_tiles", weight_tiles);
  if (zero_tiles) check_part(op, "zero_tiles", *zero_tiles, at::kByte, groups, "weight_tiles", weight_tiles);
  args.has_zeros = zero_tiles.has_value();
  args.outliers = static_cast<int32_t>(outliers);
  if (const char* problem = mlspec_cuda_problem_of_outliers(&args)) TORCH_CHECK_VALUE(false, op, ": ", problem);
  TORCH_CHECK_VALUE(codes.dim() == 2 && codes.size(1) == in, op, ": codes has shape ", codes.sizes(), ", the weight takes in_features = ",
                    in);
  const int64_t n = codes.size(0);
  check_part(op, "codes", codes, at::kChar, {n, in}, "weight_tiles", weight_tiles);
  check_part(op, "scales", scales, at::kFloat, {round_up(in, kPairInputs) / group_size, round_up(n, 4)}, "weight_tiles", weight_tiles);
  if (bias) {
    float_dtype(op, "bias", *bias);
    check_shape(op, "bias", *bias, {out_features});
    check_device(op, "bias", *bias, "codes", codes);
  }
  const CudaCall call(op, codes);
  const Tensor y = at::empty({n, out_features}, codes.options().dtype(at::kBFloat16));
  if (y.numel() == 0) return y;
  if (in == 0) return bias ? y.copy_(bias->expand(y.sizes())) : y.zero_();
  args.activation_bits = 8;  // of codes, of whichever bits
  args.activation_clip = 1;
  args.num_tokens = n;
  args.x = codes.const_data_ptr();
  args.x_scales = scales.const_data_ptr<float>();
  args.x_scale_stride = scales.size(1);
  LinearWeight weight{op, args, kHopperInt4, mlspec_cuda_portable_int4_linear, true};
  enqueue(call, weight, bias, y);
  return y;
}

// The tiles have two groups for the int8 columns of kOutliers inputs: the high nibbles of all, then the low ones.
Tensor int4_int8_linear(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, int64_t out_features,
                        const Maybe& bias, int64_t activation_bits, double activation_clip) {
  constexpr const char* op = "int4_int8_linear";
  mlspec_cuda_linear args = check_tiles(op, weight_tiles, scale_tiles, out_features, kOutliers, 2);
  TORCH_CHECK_VALUE(args.in_features >= 3 * kOutliers, op, ": weight_tiles have ", args.in_features, " columns, expected ",
                    3 * kOutliers, " or more: in_features and ", kOutliers, " outliers again");
  const int64_t groups[] = {0, scale_tiles.size(1), 16};
  check_part(op, "scale_tiles", scale_tiles, at::kHalf, groups, "weight_tiles", weight_tiles);
  check_one_of(op, "activation_bits", activation_bits, {4, 8, 16});
  check_activation_clip(op, activation_clip);
  check_linear_x(op, x, "weight_tiles", weight_tiles, args.in_features - kOutliers, bias, out_features);
  args.outliers = kOutliers;
  args.activation_bits = static_cast<int32_t>(activation_bits);
  args.activation_clip = static_cast<float>(activation_clip);
  return multiply(CudaCall(op, x), {op, args, kHopperInt4, mlspec_cuda_portable_int4_linear, true}, x, bias);
}

LinearWeight dense_weight(const char* op, const Tensor& x, const Tensor& weight, const Maybe& bias, int64_t outputs_of_weight) {
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight has shape ", weight.sizes(), ", expected [out, in]");
  check_part(op, "weight", weight, at::kBFloat16, weight.sizes(), "weight", weight, 2);
  check_linear_x(op, x, "weight", weight, weight.size(1), bias, weight.size(0));
  mlspec_cuda_linear args{};
  args.tiles = weight.const_data_ptr();
  args.in_features = weight.size(1);
  args.out_features = weight.size(0);
  args.outputs_of_weight = outputs_of_weight;
  args.activation_bits = 16;
  const bool fits_hopper = weight.size(1) % 8 == 0 && is_aligned(weight);  // rows of the copy engine
  return {op, args, kHopperBf16, mlspec_cuda_portable_bf16_linear, fits_hopper};
}

Tensor bf16_linear(const Tensor& x, const Tensor& weight, const Maybe& bias) {
  constexpr const char* op = "bf16_linear";
  return multiply(CudaCall(op, x), dense_weight(op, x, weight, bias, 0), x, bias);
}

// With few tokens in one kernel, on Hopper; else in two, with the same bits.
Tensor adapted_linear(const Tensor& x, const Tensor& weight, const Maybe& bias, const Tensor& between, const Tensor& up,
                      const Tensor& first) {
  constexpr const char* op = "adapted_linear";
  check_dtype(op, "x", x, at::kBFloat16);
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, in]");
  LinearWeight checked = dense_weight(op, x, weight, bias, 0);
  check_low_rank(op, between, up, first, x.size(0), weight.size(0), "x", x);
  const CudaCall call(op, x);
  const bool one_kernel = checked.fits_hopper && checked.hopper && hopper_serves(call.capability()) && weight.size(1) > 0 &&
                          x.size(0) <= MLSPEC_CUDA_ADAPTED_TOKENS;
  if (!one_kernel) return with_low_rank(call, multiply(call, checked, x, bias), between, up, first);
  checked.args.between = between.const_data_ptr<float>();
  checked.args.up = up.const_data_ptr<float>();
  checked.args.first = first.const_data_ptr<int32_t>();
  checked.args.low_ranks = between.size(1);
  checked.args.low_rank = up.size(0);
  return multiply(call, checked, x, bias);
}

Tensor bf16_rows_linear(const Tensor& x, const Tensor& weight, const Maybe& bias, int64_t out_features) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && out_features >= weight.size(0), "bf16_rows_linear: out_features is ", out_features,
                    ", weight has shape ", weight.sizes(), ", expected some of its rows");
  constexpr const char* op = "bf16_rows_linear";
  return multiply(CudaCall(op, x), dense_weight(op, x, weight, bias, out_features), x, bias);
}

std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x, int64_t group_size, int64_t bits, double activation_clip) {
  constexpr const char* op = "quantize_rows";
  check_dtype(op, "x", x, at::kBFloat16);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  check_one_of(op, "group_size", group_size, kGroupSizes);
  check_one_of(op, "bits", bits, {4, 8});
  check_activation_clip(op, activation_clip);
  const CudaCall call(op, x);
  const int64_t in = x.size(-1);
  std::vector<int64_t> shape = x.sizes().vec();
  const Tensor codes = at::empty(shape, x.options().dtype(at::kChar));
  shape.back() = round_up(in, group_size) / group_size;
  const Tensor scales = at::empty(shape, x.options().dtype(at::kFloat));
  if (x.numel() == 0) return {codes, scales};
  const Tensor rows = bf16_rows(x, in);
  mlspec_cuda_quantize args{};
  args.x = rows.const_data_ptr();
  args.codes = codes.mutable_data_ptr();
  args.scales = scales.mutable_data_ptr<float>();
  args.num_tokens = rows.size(0);
  args.in_features = in;
  args.group_size = static_cast<int32_t>(group_size);
  args.bits = static_cast<int32_t>(bits);
  args.clip = static_cast<float>(activation_clip);
  args.overlap = call.overlap();
  args.stream = call.stream();
  call.check(mlspec_cuda_quantize_rows(&args));
  return {codes, scales};
}

std::string cuda_linears(int64_t device) {
  return hopper_serves(compute_capability(static_cast<c10::DeviceIndex>(device))) ? "sm_90a" : "sm_80+";
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("mxfp4_linear", mxfp4_linear);
  m.impl("int4_linear", int4_linear);
  m.impl("int4_sums", int4_sums);
  m.impl("int4_codes_linear", int4_codes_linear);
  m.impl("int4_int8_linear", int4_int8_linear);
  m.impl("adapted_linear", adapted_linear);
  m.impl("bf16_linear", bf16_linear);
  m.impl("bf16_rows_linear", bf16_rows_linear);
  m.impl("quantize_rows", quantize_rows);
}

TORCH_LIBRARY_IMPL(mlspec, CompositeExplicitAutograd, m) { m.impl("cuda_linears", cuda_linears); }
