// How do the kernels of experts meet torch on a GPU? What the ops take: hf_mlspec/ops/experts.py and expert_plans.py. Nothing is read
// back: which experts a token goes to is trusted, route_rows wrote it.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <functional>
#include <tuple>
#include <vector>

#include "linear.h"
#include "row_checks.h"
#include "../../cuda/experts/experts.h"

namespace {

using namespace mlspec;

using Routed = std::tuple<Tensor, Tensor, Tensor>;
using RouteKernel = std::function<void(const mlspec_cuda_routing&, const CudaCall&)>;

// run: of one row or more.
Routed routed(const char* op, const Tensor& x, const Tensor& router, const Maybe& bias, int64_t num_experts, int64_t chosen,
              int64_t renormalize, const Maybe& choice_bias, int64_t groups, int64_t chosen_groups, double scale,
              const RouteKernel& run) {
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 2 && router.dim() == 2, op, ": x has shape ", x.sizes(), " and router ", router.sizes(),
                    ", expected [n, hidden] and [experts, hidden]");
  const bool wide = router.scalar_type() == at::kFloat;
  const int64_t tokens = x.size(0), hidden = x.size(1), shared = router.size(0) - num_experts;
  check_part(op, "router", router, wide ? at::kFloat : at::kBFloat16, {router.size(0), hidden}, "x", x);
  TORCH_CHECK_VALUE(num_experts >= 1 && num_experts <= MLSPEC_CUDA_MOST_EXPERTS && (shared == 0 || shared == 1), op, ": router has ",
                    router.size(0), " rows for num_experts = ", num_experts, ", expected as many or one more, 1 to ",
                    +MLSPEC_CUDA_MOST_EXPERTS);
  TORCH_CHECK_VALUE(chosen >= 1 && chosen <= num_experts, op, ": chosen is ", chosen, ", expected 1 to ", num_experts);
  TORCH_CHECK_VALUE(hidden > 0 && hidden % 8 == 0, op, ": x has ", hidden, " columns, the CUDA kernels take multiples of 8");
  if (bias) check_vector(op, "bias", *bias, router.size(0), "x", x, at::kFloat);
  if (choice_bias) check_vector(op, "choice_bias", *choice_bias, num_experts, "x", x, at::kFloat);
  TORCH_CHECK_VALUE(groups >= 1 && groups <= MLSPEC_CUDA_MOST_GROUPS && chosen_groups >= 1 && chosen_groups <= groups, op,
                    ": chosen_groups is ", chosen_groups, " of ", groups, " groups, expected 1 to ", +MLSPEC_CUDA_MOST_GROUPS);
  const CudaCall call(op, x);
  const int64_t pairs = tokens * chosen, items = mlspec_cuda_most_items(pairs, num_experts);
  const auto int32s = x.options().dtype(at::kInt), floats = x.options().dtype(at::kFloat);
  const Tensor experts = at::empty({tokens, chosen}, int32s), weights = at::empty({tokens, chosen + shared}, floats);
  const Tensor plan = at::empty({pairs + 3 * items}, int32s);
  if (tokens == 0) return {experts, weights, plan};
  const Tensor rows = dense(x), logits = at::empty({tokens, num_experts + shared}, floats);
  mlspec_cuda_routing args{};
  args.x = rows.const_data_ptr(), args.router = router.const_data_ptr();
  args.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  args.logits = logits.mutable_data_ptr<float>();
  args.experts = experts.mutable_data_ptr<int32_t>(), args.weights = weights.mutable_data_ptr<float>();
  args.plan = plan.mutable_data_ptr<int32_t>();
  args.num_tokens = tokens, args.hidden = hidden;
  args.num_experts = static_cast<int32_t>(num_experts), args.chosen = static_cast<int32_t>(chosen);
  args.renormalize = renormalize != 0, args.has_shared = static_cast<int32_t>(shared), args.router_is_float32 = wide;
  args.choice_bias = choice_bias ? choice_bias->const_data_ptr<float>() : nullptr;
  args.groups = static_cast<int32_t>(groups), args.chosen_groups = static_cast<int32_t>(chosen_groups);
  args.scale = static_cast<float>(scale);
  run(args, call);
  return {experts, weights, plan};
}

Routed route_rows(const Tensor& x, const Tensor& router, const Maybe& bias, int64_t num_experts, int64_t chosen, int64_t renormalize,
                  const Maybe& choice_bias, int64_t groups, int64_t chosen_groups, double scale) {
  return routed("route_rows", x, router, bias, num_experts, chosen, renormalize, choice_bias, groups, chosen_groups, scale,
                [](const mlspec_cuda_routing& args, const CudaCall& call) {
                  const mlspec_cuda_row_launch launch = how(call);
                  call.check(mlspec_cuda_route_rows(&args, &launch));
                });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> norm_route_row(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, const Tensor& router, const Maybe& bias,
    int64_t num_experts, int64_t chosen, int64_t renormalize, const Maybe& choice_bias, int64_t groups, int64_t chosen_groups,
    double scale) {
  constexpr const char* op = "norm_route_row";
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) == 1, op, ": x has shape ", x.sizes(), ", expected [1, hidden]");
  check_part(op, "x", x, at::kBFloat16, x.sizes(), "x", x);
  check_part(op, "residual", residual, at::kBFloat16, x.sizes(), "x", x);
  const bool narrow = weight.scalar_type() == at::kBFloat16;
  check_part(op, "weight", weight, narrow ? at::kBFloat16 : at::kFloat, {x.size(1)}, "x", x);
  const Tensor normed = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  const mlspec_cuda_route_norm norm{residual.const_data_ptr(), weight.const_data_ptr(), normed.mutable_data_ptr(),
                                    total.mutable_data_ptr(), narrow, static_cast<float>(eps)};
  const auto [experts, weights, plan] =
      routed(op, x, router, bias, num_experts, chosen, renormalize, choice_bias, groups, chosen_groups, scale,
             [&](const mlspec_cuda_routing& args, const CudaCall& call) {
               const mlspec_cuda_row_launch launch = how(call);
               call.check(mlspec_cuda_route_normed_row(&args, &norm, &launch));
             });
  return {normed, total, experts, weights, plan};
}

Tensor plan_rows(const Tensor& experts, int64_t num_experts) {
  constexpr const char* op = "plan_rows";
  TORCH_CHECK_VALUE(experts.dim() == 2, op, ": experts has shape ", experts.sizes(), ", expected [n, chosen]");
  check_part(op, "experts", experts, at::kInt, experts.sizes(), "experts", experts, 4);
  TORCH_CHECK_VALUE(num_experts >= 1 && num_experts <= MLSPEC_CUDA_MOST_EXPERTS, op, ": num_experts is ", num_experts,
                    ", expected 1 to ", +MLSPEC_CUDA_MOST_EXPERTS);
  const CudaCall call(op, experts);
  const int64_t pairs = experts.numel();
  const Tensor plan = at::empty({pairs + 3 * mlspec_cuda_most_items(pairs, num_experts)}, experts.options());
  if (pairs == 0) return plan;
  mlspec_cuda_routing args{};
  args.experts = const_cast<int32_t*>(experts.const_data_ptr<int32_t>()), args.plan = plan.mutable_data_ptr<int32_t>();
  args.num_tokens = experts.size(0), args.chosen = static_cast<int32_t>(experts.size(1));
  args.num_experts = static_cast<int32_t>(num_experts);
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_plan_rows(&args, &launch));
  return plan;
}

// What the products of experts have in common: x [n, in] or [pairs, in], and where its rows go.
mlspec_cuda_expert_linear check_rows(const char* op, const Tensor& x, const Tensor& weight, int64_t in, const Tensor& experts,
                                     const Tensor& plan) {
  check_bf16(op, "x", x);
  check_device(op, "weight", weight, "x", x);
  TORCH_CHECK_VALUE(experts.dim() == 2, op, ": experts has shape ", experts.sizes(), ", expected [n, chosen]");
  check_part(op, "experts", experts, at::kInt, experts.sizes(), "x", x, 4);
  const int64_t pairs = experts.numel();
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) == in && (x.size(0) == experts.size(0) || x.size(0) == pairs), op, ": x has shape ",
                    x.sizes(), ", expected [", experts.size(0), " or ", pairs, ", ", in, "]");
  const int64_t count = weight.size(0);
  TORCH_CHECK_VALUE(count >= 1, op, ": there are no experts");
  check_vector(op, "plan", plan, pairs + 3 * mlspec_cuda_most_items(pairs, count), "x", x);
  mlspec_cuda_expert_linear args{};
  args.plan = plan.const_data_ptr<int32_t>();
  args.num_pairs = pairs, args.num_experts = count;
  args.linear.tiles = weight.const_data_ptr();
  args.linear.num_tokens = x.size(0), args.linear.in_features = in;
  args.linear.activation_bits = 16;
  return args;
}

constexpr int64_t kGatedOutputs = 64;  // a tile's: 32 of gate, 32 of up

using ExpertKernel = const char* (*)(const mlspec_cuda_expert_linear*);

struct Gate {
  double slope, limit;  // limit 0: gate and up do not come in turns
  int64_t activation;   // -1: gate does not come before up
};

// bias [experts, out], float32 or bfloat16.
Tensor multiply_rows(const char* op, ExpertKernel kernel, mlspec_cuda_expert_linear args, const Tensor& x, const Maybe& bias,
                     Gate gate) {
  mlspec_cuda_linear& a = args.linear;
  TORCH_CHECK_VALUE(gate.limit >= 0 && std::isfinite(gate.limit) && std::isfinite(gate.slope), op, ": slope is ", gate.slope,
                    " and limit ", gate.limit, ", expected finite numbers, the limit 0 (none) or above");
  TORCH_CHECK_VALUE(gate.limit == 0 || a.out_features % 2 == 0, op, ": ", a.out_features, " outputs cannot be gate and up in turns");
  TORCH_CHECK_VALUE(gate.activation >= -1 && gate.activation <= 4 && (gate.activation < 0 || gate.limit == 0), op, ": activation is ",
                    gate.activation, " and limit ", gate.limit, ", expected -1 (none), or 0 to 4 without a limit");
  TORCH_CHECK_VALUE(gate.activation < 0 || a.out_features % kGatedOutputs == 0, op, ": ", a.out_features,
                    " outputs, the CUDA kernels take gate before up in multiples of ", +kGatedOutputs);
  args.slope = static_cast<float>(gate.slope), args.limit = static_cast<float>(gate.limit);
  args.activation = static_cast<int32_t>(gate.activation);
  if (bias) {
    a.bias_is_float32 = bias->scalar_type() == at::kFloat;
    check_part(op, "bias", *bias, a.bias_is_float32 ? at::kFloat : at::kBFloat16, {args.num_experts, a.out_features}, "x", x,
               bias->element_size());
    a.bias = bias->const_data_ptr();
  }
  const CudaCall call(op, x);
  const bool gated = gate.limit > 0 || gate.activation >= 0;
  const Tensor y = at::empty({args.num_pairs, gated ? a.out_features / 2 : a.out_features}, x.options());
  if (y.numel() == 0) return y;
  TORCH_CHECK_VALUE(!bias || a.in_features > 0, op, ": x has no columns");
  if (a.in_features == 0) return y.zero_();
  const Tensor rows = dense(x);
  std::tuple<Tensor, Tensor> codes;
  a.x = rows.const_data_ptr();
  if (a.activation_bits != 16) codes = quantized(call, rows, a.group_size, a.activation_bits, a);
  a.out = y.mutable_data_ptr();
  a.overlap = call.overlap(), a.stream = call.stream();
  call.check(kernel(&args));
  return y;
}

Tensor dense_expert_rows(const Tensor& x, const Tensor& weight, const Maybe& bias, const Tensor& experts, const Tensor& plan,
                         double slope, double limit,
                         int64_t activation) {
  constexpr const char* op = "dense_expert_rows";
  TORCH_CHECK_VALUE(weight.dim() == 3, op, ": weight has shape ", weight.sizes(), ", expected [experts, out, in]");
  check_part(op, "weight", weight, at::kBFloat16, weight.sizes(), "weight", weight, 2);
  mlspec_cuda_expert_linear args = check_rows(op, x, weight, weight.size(2), experts, plan);
  args.linear.out_features = weight.size(1);
  args.bytes_of_expert = weight.size(1) * weight.size(2) * 2;
  return multiply_rows(op, mlspec_cuda_bf16_experts, args, x, bias, {slope, limit, activation});
}

// Tiles of every expert as those of a linear, stacked; scale_tiles tell in_features.
mlspec_cuda_expert_linear check_tiles(const char* op, const Tensor& x, const Tensor& tiles, const Tensor& scale_tiles, int64_t out,
                                      int64_t group, int64_t bytes_of_scales, const Tensor& experts, const Tensor& plan) {
  TORCH_CHECK_VALUE(tiles.dim() == 4 && scale_tiles.dim() == 4, op, ": weight_tiles has shape ", tiles.sizes(), " and scale_tiles ",
                    scale_tiles.sizes(), ", expected 4 axes from prepack, experts first");
  const int64_t in = scale_tiles.size(2) * group, pairs = round_up(std::max<int64_t>(out, 0), kPairOutputs) / kPairOutputs;
  const int64_t chunks = round_up(in, kPairInputs) / kPairInputs;
  const int64_t bytes = kPairOutputs * kPairInputs / 2 + kPairOutputs * (kPairInputs / group) * bytes_of_scales;
  check_part(op, "weight_tiles", tiles, at::kByte, {tiles.size(0), pairs, chunks, bytes}, "x", x);
  mlspec_cuda_expert_linear args = check_rows(op, x, tiles, in, experts, plan);
  args.linear.out_features = out;
  args.linear.group_size = static_cast<int32_t>(group);
  args.bytes_of_expert = pairs * chunks * bytes;
  return args;
}

Tensor mxfp4_expert_rows(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, const Maybe& bias,
                         const Tensor& experts, const Tensor& plan, int64_t out_features, int64_t activation_bits, double slope,
                         double limit, int64_t activation) {
  constexpr const char* op = "mxfp4_expert_rows";
  mlspec_cuda_expert_linear args = check_tiles(op, x, weight_tiles, scale_tiles, out_features, kBlock, 1, experts, plan);
  const int64_t blocks = scale_tiles.size(2);
  check_part(op, "scale_tiles", scale_tiles, at::kByte, {weight_tiles.size(0), 1, blocks, 4}, "x", x, 4);
  check_one_of(op, "activation_bits", activation_bits, {8, 16});
  args.linear.exponent_shift = static_cast<const int32_t*>(scale_tiles.const_data_ptr());
  args.shifts_of_expert = blocks;
  args.linear.activation_bits = static_cast<int32_t>(activation_bits);
  return multiply_rows(op, mlspec_cuda_mxfp4_experts, args, x, bias, {slope, limit, activation});
}

Tensor int4_expert_rows(const Tensor& x, const Tensor& weight_tiles, const Tensor& scale_tiles, const Maybe& zero_tiles,
                        const Maybe& bias, const Tensor& experts, const Tensor& plan, int64_t out_features, int64_t group_size,
                        int64_t activation_bits, double activation_clip, double slope, double limit,
                         int64_t activation) {
  constexpr const char* op = "int4_expert_rows";
  check_one_of(op, "group_size", group_size, kGroupSizes);
  mlspec_cuda_expert_linear args =
      check_tiles(op, x, weight_tiles, scale_tiles, out_features, group_size, zero_tiles ? 3 : 2, experts, plan);
  check_dtype(op, "scale_tiles", scale_tiles, at::kHalf);
  if (zero_tiles) check_dtype(op, "zero_tiles", *zero_tiles, at::kByte);
  check_one_of(op, "activation_bits", activation_bits, {4, 8, 16});
  check_activation_clip(op, activation_clip);
  args.linear.has_zeros = zero_tiles.has_value();
  args.linear.activation_bits = static_cast<int32_t>(activation_bits);
  args.linear.activation_clip = static_cast<float>(activation_clip);
  return multiply_rows(op, mlspec_cuda_int4_experts, args, x, bias, {slope, limit, activation});
}

Tensor nested_expert_rows(const Tensor& x, const Tensor& draft_tiles, const Tensor& exponent_tiles, const Tensor& low_tiles,
                          const Tensor& codebook, const Maybe& bias, const Tensor& experts, const Tensor& plan, int64_t out_features,
                          int64_t weight_bits, int64_t activation_bits, double slope, double limit,
                         int64_t activation) {
  constexpr const char* op = "nested_expert_rows";
  mlspec_cuda_expert_linear args = check_tiles(op, x, draft_tiles, exponent_tiles, out_features, kBlock, 1, experts, plan);
  const int64_t count = draft_tiles.size(0), blocks = exponent_tiles.size(2);
  check_part(op, "exponent_tiles", exponent_tiles, at::kByte, {count, 1, blocks, 4}, "x", x, 4);
  check_part(op, "low_tiles", low_tiles, at::kByte, {count, draft_tiles.size(1), draft_tiles.size(2), gpu_tiles::kPairLowBytes}, "x", x);
  check_part(op, "codebook", codebook, at::kByte, {count, kCodebookLevels}, "x", x, 4);
  const bool exact = weight_bits == 16 && activation_bits == 16;
  TORCH_CHECK_VALUE(exact || (weight_bits == 4 && (activation_bits == 8 || activation_bits == 16)), op, ": weight_bits is ",
                    weight_bits, " and activation_bits ", activation_bits, ", choose one of 16 and 16, 4 and 16, 4 and 8");
  args.linear.more = exact ? low_tiles.const_data_ptr() : nullptr;
  args.more_of_expert = draft_tiles.size(1) * draft_tiles.size(2) * gpu_tiles::kPairLowBytes;
  args.linear.codebook = codebook.const_data_ptr();
  args.linear.exponent_shift = static_cast<const int32_t*>(exponent_tiles.const_data_ptr());
  args.shifts_of_expert = blocks;
  args.linear.weight_bits = static_cast<int32_t>(weight_bits);
  args.linear.activation_bits = static_cast<int32_t>(activation_bits);
  return multiply_rows(op, mlspec_cuda_nested_experts, args, x, bias, {slope, limit, activation});
}

// plane_tiles [experts, pairs, chunks, bytes], scale_tiles [experts, 0, in / group, 16].
Tensor plane_expert_rows(const Tensor& x, const Tensor& plane_tiles, const Tensor& scale_tiles, const Maybe& bias, const Tensor& experts,
                         const Tensor& plan, int64_t out_features, int64_t group_size, int64_t zero_doubled, int64_t num_planes,
                         double slope, double limit, int64_t activation) {
  constexpr const char* op = "plane_expert_rows";
  check_one_of(op, "group_size", group_size, kGroupSizes);
  TORCH_CHECK_VALUE(plane_tiles.dim() == 4 && scale_tiles.dim() == 4, op, ": plane_tiles has shape ", plane_tiles.sizes(),
                    " and scale_tiles ", scale_tiles.sizes(), ", expected 4 axes from prepack_planes on a GPU, experts first");
  const int64_t count = plane_tiles.size(0), in = scale_tiles.size(2) * group_size;
  const int64_t pairs = round_up(std::max<int64_t>(out_features, 0), kPairOutputs) / kPairOutputs;
  const int64_t chunks = round_up(in, kPairInputs) / kPairInputs, scales = kPairOutputs * (kPairInputs / group_size) * 2;
  const int64_t bytes = plane_tiles.size(3), stored = (bytes - scales) / gpu_tiles::kPairPlaneBytes;
  TORCH_CHECK_VALUE((bytes - scales) % gpu_tiles::kPairPlaneBytes == 0 && 1 <= stored && stored <= kMaxPlanes, op,
                    ": plane_tiles has shape ", plane_tiles.sizes(), ", expected ", scales, " + 1 to ", kMaxPlanes, " times ",
                    +gpu_tiles::kPairPlaneBytes, " bytes of two tiles in groups of ", group_size);
  check_part(op, "plane_tiles", plane_tiles, at::kByte, {count, pairs, chunks, bytes}, "x", x);
  check_part(op, "scale_tiles", scale_tiles, at::kHalf, {count, 0, scale_tiles.size(2), 16}, "x", x);
  TORCH_CHECK_VALUE(1 <= num_planes && num_planes <= stored, op, ": num_planes is ", num_planes, ", the weight stores ", stored,
                    ": choose 1 to ", stored);
  const int64_t least_zero = stored == kMaxPlanes ? 254 : 0;
  TORCH_CHECK_VALUE(least_zero <= zero_doubled && zero_doubled <= 256, op, ": zero_doubled is ", zero_doubled, ", of ", stored,
                    " planes it must be ", least_zero, " to 256, else weights are not exact in bfloat16");
  mlspec_cuda_expert_linear args = check_rows(op, x, plane_tiles, in, experts, plan);
  args.linear.out_features = out_features;
  args.linear.group_size = static_cast<int32_t>(group_size);
  args.linear.tile_stride = static_cast<int32_t>(bytes / 2);
  args.linear.zero_doubled = static_cast<int32_t>(zero_doubled);
  args.linear.num_planes = static_cast<int32_t>(num_planes);
  args.bytes_of_expert = pairs * chunks * bytes;
  return multiply_rows(op, mlspec_cuda_plane_experts, args, x, bias, {slope, limit, activation});
}

// All but y.
mlspec_cuda_weighted check_weighted(const char* op, const Tensor& rows, const Tensor& weights, const Maybe& shared) {
  check_bf16(op, "rows", rows);
  TORCH_CHECK_VALUE(rows.dim() == 2 && weights.dim() == 2, op, ": rows has shape ", rows.sizes(), " and weights ", weights.sizes(),
                    ", expected [n * chosen, width] and [n, chosen]");
  const int64_t tokens = weights.size(0), width = rows.size(1), most = weights.size(1);
  const bool unweighed = shared && tokens > 0 && rows.size(0) == tokens * most;
  const int64_t chosen = most - (shared && !unweighed);
  check_part(op, "rows", rows, at::kBFloat16, {tokens * chosen, width}, "rows", rows);
  check_part(op, "weights", weights, at::kFloat, weights.sizes(), "rows", rows, 4);
  if (shared) check_part(op, "shared", *shared, at::kBFloat16, {tokens, width}, "rows", rows);
  TORCH_CHECK_VALUE(chosen >= 1 && width % 8 == 0, op, ": rows has ", width, " columns, ", chosen,
                    " a token, the CUDA kernels take multiples of 8, one or more");
  mlspec_cuda_weighted args{};
  args.rows = rows.const_data_ptr(), args.weights = weights.const_data_ptr<float>();
  args.shared = shared ? shared->const_data_ptr() : nullptr;
  args.num_tokens = tokens, args.width = width;
  args.chosen = static_cast<int32_t>(chosen), args.weights_of_token = static_cast<int32_t>(most);
  return args;
}

Tensor weighted_rows(const Tensor& rows, const Tensor& weights, const Maybe& shared) {
  constexpr const char* op = "weighted_rows";
  mlspec_cuda_weighted args = check_weighted(op, rows, weights, shared);
  const CudaCall call(op, rows);
  const Tensor y = at::empty({args.num_tokens, args.width}, rows.options());
  if (y.numel() == 0) return y;
  args.y = y.mutable_data_ptr();
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_weighted_rows(&args, &launch));
  return y;
}

std::tuple<Tensor, Tensor> weighted_norm_rows(const Tensor& rows, const Tensor& weights, const Maybe& shared, const Tensor& residual,
                                              const Tensor& weight, double eps) {
  constexpr const char* op = "weighted_norm_rows";
  const mlspec_cuda_weighted args = check_weighted(op, rows, weights, shared);
  check_part(op, "residual", residual, at::kBFloat16, {args.num_tokens, args.width}, "rows", rows);
  const bool narrow = weight.scalar_type() == at::kBFloat16;
  check_part(op, "weight", weight, narrow ? at::kBFloat16 : at::kFloat, {args.width}, "rows", rows);
  const CudaCall call(op, rows);
  const Tensor normed = at::empty(residual.sizes(), rows.options()), total = at::empty(residual.sizes(), rows.options());
  if (normed.numel() == 0) return {normed, total};
  const mlspec_cuda_weighted_norm norm{residual.const_data_ptr(), weight.const_data_ptr(), normed.mutable_data_ptr(),
                                       total.mutable_data_ptr(), narrow, static_cast<float>(eps)};
  const mlspec_cuda_row_launch launch = how(call);
  call.check(mlspec_cuda_weighted_norm_rows(&args, &norm, &launch));
  return {normed, total};
}

}  // namespace

TORCH_LIBRARY_IMPL(mlspec, CUDA, m) {
  m.impl("route_rows", route_rows);
  m.impl("norm_route_row", norm_route_row);
  m.impl("plan_rows", plan_rows);
  m.impl("dense_expert_rows", dense_expert_rows);
  m.impl("mxfp4_expert_rows", mxfp4_expert_rows);
  m.impl("int4_expert_rows", int4_expert_rows);
  m.impl("nested_expert_rows", nested_expert_rows);
  m.impl("plane_expert_rows", plane_expert_rows);
  m.impl("weighted_rows", weighted_rows);
  m.impl("weighted_norm_rows", weighted_norm_rows);
}
