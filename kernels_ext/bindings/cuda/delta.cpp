// How do the kernels of gated delta nets and Mamba-2 on a GPU meet torch? What the ops take: hf_mlspec/ops/delta.py.
#include <ATen/ops/empty.h>

#include "row_checks.h"
#include "../../cuda/delta/delta.h"

namespace {

using namespace mlspec;

// sizes: key_heads, value_heads, key_dim, value_dim. ba: none of Mamba-2. Everything but scratch and what comes out; also checked.
mlspec_cuda_delta checked(const char* op, const Tensor& qkvz, const Maybe& ba, const Tensor& taps, at::IntArrayRef sizes,
                          const Tensor& states, const Tensor& inputs, int64_t settles) {
  TORCH_CHECK_VALUE(sizes.size() == 4 && sizes[0] > 0 && sizes[1] > 0 && sizes[1] % sizes[0] == 0, op, ": sizes is ", sizes,
                    ", expected key heads, value heads that they divide, and the elements of both");
  const int64_t values = sizes[1] * sizes[3], channels = 2 * sizes[0] * sizes[2] + values, taps_count = taps.dim() == 2 ? taps.size(0) : 0;
  TORCH_CHECK_VALUE(mlspec_cuda_delta_padded(int32_t(sizes[2]), int32_t(sizes[3]), int32_t(taps_count)), op, ": heads of ", sizes[2],
                    " and ", sizes[3], " elements and ", taps_count, " taps, expected multiples of 4 up to 256, and 2 to 8 taps");
  check_bf16(op, "qkvz", qkvz);
  TORCH_CHECK_VALUE(qkvz.dim() == 3, op, ": qkvz has shape ", qkvz.sizes(), ", expected [batch, width, ", channels + values, "]");
  const int64_t batch = qkvz.size(0), width = qkvz.size(1), window = inputs.dim() == 3 ? inputs.size(1) : 0;
  check_part(op, "qkvz", qkvz, at::kBFloat16, {batch, width, channels + values + (ba ? 0 : sizes[1])}, "qkvz", qkvz, 2);
  if (ba) check_part(op, "ba", *ba, at::kBFloat16, {batch, width, 2 * sizes[1]}, "qkvz", qkvz, 2);
  check_part(op, "taps", taps, at::kFloat, {taps_count, channels}, "qkvz", qkvz, 4);
  check_part(op, "states", states, at::kFloat, {batch, sizes[1], sizes[2], sizes[3]}, "qkvz", qkvz);
  check_part(op, "inputs", inputs, at::kBFloat16, {batch, window, channels + 2 * sizes[1]}, "qkvz", qkvz, 2);
  TORCH_CHECK_VALUE(window >= taps_count, op, ": inputs has ", window, " tokens of a row, expected at least ", taps_count);
  TORCH_CHECK_VALUE(settles >= MLSPEC_STATE_KEEP && settles <= MLSPEC_STATE_AT_END, op, ": settles is ", settles, ", choose one of 0, 1, 2");
  TORCH_CHECK_VALUE(batch <= 65535 && width <= 65535, op, ": ", batch, " rows of ", width, " tokens, expected up to 65535 of each");
  mlspec_cuda_delta args{};
  args.qkvz = qkvz.const_data_ptr(), args.ba = ba ? ba->const_data_ptr() : nullptr, args.taps = taps.const_data_ptr<float>();
  args.states = states.mutable_data_ptr<float>(), args.inputs = inputs.mutable_data_ptr();
  args.batch = int32_t(batch), args.width = int32_t(width), args.window = int32_t(window), args.num_taps = int32_t(taps_count);
  args.key_heads = int32_t(sizes[0]), args.value_heads = int32_t(sizes[1]);
  args.key_dim = int32_t(sizes[2]), args.value_dim = int32_t(sizes[3]), args.settles = int32_t(settles);
  return args;
}

Tensor delta_rows(const Tensor& qkvz, const Maybe& ba, const Tensor& taps, const Tensor& rate, const Tensor& shift, const Tensor& norm,
                  double eps, const Tensor& starts, const Tensor& counts, const Tensor& marks, const Tensor& states, const Tensor& inputs,
                  at::IntArrayRef sizes, int64_t settles, int64_t behind, const Maybe& bias, const Maybe& skip, int64_t normed) {
  constexpr const char* op = "delta_rows";
  mlspec_cuda_delta args = checked(op, qkvz, ba, taps, sizes, states, inputs, settles);
  check_vector(op, "rate", rate, args.value_heads, "qkvz", qkvz, at::kFloat);
  check_vector(op, "shift", shift, args.value_heads, "qkvz", qkvz, at::kFloat);
  const int64_t given = int64_t(args.value_heads) * args.value_dim, wide = 2LL * args.key_heads * args.key_dim + given;
  TORCH_CHECK_VALUE(skip.has_value() != ba.has_value() && (skip || !bias), op, ": a gated delta net has ba, Mamba-2 skip and perhaps bias");
  if (skip) check_vector(op, "skip", *skip, args.value_heads, "qkvz", qkvz, at::kFloat);
  if (bias) check_vector(op, "bias", *bias, wide, "qkvz", qkvz, at::kFloat);
  TORCH_CHECK_VALUE(skip ? normed > 0 && given % normed == 0 : normed == args.value_dim, op, ": normed is ", normed, ", expected ",
                    skip ? "a divisor of " : "", skip ? given : int64_t(args.value_dim));
  check_vector(op, "norm", norm, skip ? given : args.value_dim, "qkvz", qkvz, at::kFloat);
  args.bias = bias ? bias->const_data_ptr<float>() : nullptr, args.skip = skip ? skip->const_data_ptr<float>() : nullptr;
  args.normed = static_cast<int32_t>(normed);
  check_vector(op, "starts", starts, args.batch, "qkvz", qkvz);
  check_vector(op, "counts", counts, args.batch, "qkvz", qkvz);
  check_vector(op, "marks", marks, args.batch, "qkvz", qkvz);
  TORCH_CHECK_VALUE(behind >= 0 && behind <= args.window, op, ": behind is ", behind, ", expected 0 to ", args.window);
  args.behind = static_cast<int32_t>(behind);
  TORCH_CHECK_VALUE(eps >= 0, op, ": eps is ", eps, ", expected 0 or a positive number");
  const CudaCall call(op, qkvz);
  const int64_t batch = args.batch, width = args.width, most = width + args.window, heads = args.value_heads;
  Tensor out = at::empty({batch, width, heads * args.value_dim}, qkvz.options());
  if (out.numel() == 0) return out;
  const auto scratch = [&](at::IntArrayRef shape) { return at::empty(shape, qkvz.options().dtype(at::kFloat)); };
  const Tensor keys = scratch({batch, most, args.key_heads, 2, mlspec_cuda_delta_padded(args.key_dim, args.value_dim, args.num_taps)});
  const Tensor values = scratch({batch, most, heads, args.value_dim}), weights = scratch({batch, most, heads, 2});
  const Tensor products = scratch({batch, most, args.key_heads}), mixed = scratch({batch, width, heads, args.value_dim});
  args.keys = keys.mutable_data_ptr<float>(), args.values = values.mutable_data_ptr<float>();
  args.weights = weights.mutable_data_ptr<float>(), args.products = products.mutable_data_ptr<float>();
  args.mixed = mixed.mutable_data_ptr<float>(), args.out = out.mutable_data_ptr();
  args.rate = rate.const_data_ptr<float>(), args.shift = shift.const_data_ptr<float>(), args.norm = norm.const_data_ptr<float>();
  args.starts = starts.const_data_ptr<int32_t>(), args.counts = counts.const_data_ptr<int32_t>();
  args.marks = marks.const_data_ptr<int32_t>(), args.eps = static_cast<float>(eps);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_delta_rows(&args, &launch));
  return out;
}

Tensor sigmoid_gated(const Tensor& x, const Tensor& gates) {
  constexpr const char* op = "sigmoid_gated";
  check_bf16(op, "x", x);
  check_bf16(op, "gates", gates);
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, width]");
  check_shape(op, "gates", gates, x.sizes());
  check_device(op, "gates", gates, "x", x);
  TORCH_CHECK_VALUE(gates.size(1) < 2 || gates.stride(1) == 1, op, ": gates has strides ", gates.strides(),
                    ", the elements of a row have to lie one behind the other");
  const CudaCall call(op, x);
  Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const Tensor rows = dense(x);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_sigmoid_gated(rows.const_data_ptr(), gates.const_data_ptr(), gates.stride(0), x.size(0), x.size(1),
                                       out.mutable_data_ptr(), &launch));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("delta_rows", delta_rows);
  m.impl("sigmoid_gated", sigmoid_gated);
}
