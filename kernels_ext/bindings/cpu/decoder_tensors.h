// Which tensors may a compiled decoder hold? Format, sizes and memory; every message names the tensor and the numbers.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "../../cpu/decoder/decoder_rounds.h"
#include "../../formats.h"

namespace mlspec {

using namespace cpu_tiles;

inline mlspec_dtype storage_dtype(const at::Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return MLSPEC_FLOAT32;
    case at::kBFloat16: return MLSPEC_BFLOAT16;
    default: TORCH_CHECK_TYPE(false, what, " is ", tensor.scalar_type(), ", expected float32 or bfloat16");
  }
}

inline void check_plain(const at::Tensor& tensor, const std::string& what, at::ScalarType dtype, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), what, " is on ", tensor.device(), ", the compiled decoder runs on the CPU");
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, what, " is ", tensor.scalar_type(), ", expected ", dtype);
  TORCH_CHECK_VALUE(tensor.sizes() == shape && tensor.is_contiguous(), what, " has shape ", tensor.sizes(),
                    tensor.is_contiguous() ? "" : " (not contiguous)", ", expected contiguous ", shape);
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), size = uintptr_t(tensor.element_size());
  TORCH_CHECK_VALUE(address % size == 0, what, " starts at an address that is no multiple of ", size,
                    " bytes; call .clone() once and keep the result");
}

// in and out are what the buffers of a pass have room for.
// ranks: processes that share the decoder; each has all outputs of the head, or as many as the others.
inline void check_place(const std::string& name, const DecoderShape& s, int64_t in, int64_t out, int64_t ranks) {
  const int64_t queries = s.heads * s.head_dim, keys = s.kv_heads * s.head_dim;
  if (name.rfind("shared_", 0) == 0) {  // of a width of its own, which check_experts looks at
    const bool down = name == "shared_down";
    TORCH_CHECK_VALUE((down ? out : in) == s.hidden, name, " maps ", in, " to ", out, " features, the decoder has ", s.hidden);
    return;
  }
  const bool from_hidden = name != "o" && name != "down" && name != "inputs_out";
  const int64_t inputs = from_hidden ? s.hidden : name == "o" ? queries : s.intermediate;
  const int64_t gated = s.gated_heads ? 2 : 1;
  const int64_t outputs = !from_hidden    ? s.hidden
                          : name == "head" ? (out * ranks == s.vocab ? out : s.vocab)
                          : name == "q"    ? gated * queries + (s.grouped_qkv ? 2 * keys : 0)
                          : name == "k" || name == "v" ? keys
                                                       : s.intermediate;
  TORCH_CHECK_VALUE(in == inputs && out == outputs, name, " maps ", in, " to ", out, " features, the decoder's maps ", inputs,
                    " to ", outputs);
}

inline void check_weight(const std::string& name, const Linear& linear, const at::Tensor& weight,
                         const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& zero) {
  const int64_t in = linear.in_features, out = linear.out_features, group = linear.group, bits = linear.own.activation;
  const int64_t tiles = (out + kTileOutputs - 1) / kTileOutputs, blocks = in / kBlock;
  const std::string what = name + ".weight";
  switch (linear.format) {
    case WeightFormat::kBf16: return check_plain(weight, what, at::kBFloat16, {out, in});
    case WeightFormat::kF32: return check_plain(weight, what, at::kFloat, {out, in});
    case WeightFormat::kMxfp4:
      TORCH_CHECK_VALUE(in % kBlock == 0 && scale, what, ": MXFP4 takes scales and in_features a multiple of 32, not ", in);
      TORCH_CHECK_VALUE(bits == 8 || bits == 16, what, ": activation_bits is ", bits, ", choose 8 or 16");
      check_plain(*scale, name + ".scale", at::kByte, {tiles, blocks, kTileOutputs});
      break;
    case WeightFormat::kInt4:
      TORCH_CHECK_VALUE(is_group_size(group) && in % group == 0 && scale, what,
                        ": int4 takes scales of groups of 32, 64 or 128 that divide ", in, ", not of ", group);
      TORCH_CHECK_VALUE(bits == 4 || bits == 8 || bits == 16, what, ": activation_bits is ", bits, ", choose 4, 8 or 16");
      check_plain(*scale, name + ".scale", at::kHalf, {tiles, in / group, kTileOutputs});
      if (zero) check_plain(*zero, name + ".zero", at::kByte, {tiles, in / group, kTileOutputs});
      break;
    default:
      TORCH_CHECK_VALUE(false, what, ": format ", static_cast<int64_t>(linear.format), " is none of bfloat16 (0), float32 (1), ",
                        "MXFP4 (2) and int4 (3); set_nested, set_planes, set_lut and set_zipper take the others");
  }
  check_plain(weight, what, at::kByte, {tiles, blocks, kTileBytes});
}

// int4 columns and, as two groups of nibbles, kOutliers int8 columns (hf_mlspec/ops/int4_int8.py); set_order completes it.
inline Linear outlier_linear(const std::string& name, int64_t in, int64_t out, const at::Tensor& weight, const at::Tensor& scale,
                             int64_t bits) {
  TORCH_CHECK_VALUE(in % kOutliers == 0 && in >= 2 * kOutliers, name, ".weight: int4-int8 takes in_features a multiple of ",
                    kOutliers, " from ", 2 * kOutliers, " on, not ", in);
  Linear linear;
  linear.format = WeightFormat::kInt4;
  linear.group = kOutliers, linear.own = {4, bits};
  linear.in_features = in + kOutliers, linear.out_features = out;
  check_weight(name, linear, weight, scale, std::nullopt);
  linear.in_features = in, linear.outliers = kOutliers;
  linear.weight = weight.const_data_ptr(), linear.scale = scale.const_data_ptr();
  return linear;
}

// What an adapter adds to a linear that is there already.
inline LowRank checked_adapter(const std::string& name, const Linear& linear, const at::Tensor& down, const at::Tensor& up) {
  TORCH_CHECK_VALUE(linear.weight && !linear.rotates(), name, ".adapter: set the linear first, and no rotation of its inputs");
  const int64_t rank = down.dim() == 2 ? down.size(0) : 0;
  TORCH_CHECK_VALUE(rank > 0, name, ".adapter: down has shape ", down.sizes(), ", expected [rank, ", linear.in_features, "]");
  check_plain(down, name + ".adapter.down", at::kFloat, {rank, linear.in_features});
  check_plain(up, name + ".adapter.up", at::kFloat, {linear.out_features, rank});
  return {down.const_data_ptr<float>(), up.const_data_ptr<float>(), rank};
}

// The inputs of a linear that is there already, in the order of its weight's columns.
inline const int32_t* checked_order(const std::string& name, const Linear& linear, const at::Tensor& order) {
  TORCH_CHECK_VALUE(linear.weight && linear.is_packed() && linear.format != WeightFormat::kNested, name,
                    ".order: only packed weights that are not nested order their inputs; set the linear first");
  TORCH_CHECK_VALUE(!linear.rotates(), name, ".order: its inputs are rotated, set the linear again first");
  check_plain(order, name + ".order", at::kInt, {linear.columns()});
  const int32_t* const from = order.const_data_ptr<int32_t>();
  std::vector<bool> taken(linear.in_features);
  for (int64_t i = 0; i < linear.in_features; ++i) {
    TORCH_CHECK_VALUE(from[i] >= 0 && from[i] < linear.in_features && !taken[from[i]], name, ".order[", i, "] is ", from[i],
                      ", expected each of ", linear.in_features, " inputs once");
    taken[from[i]] = true;
  }
  for (int64_t i = linear.in_features; i < linear.columns(); ++i)
    TORCH_CHECK_VALUE(from[i] == from[i - linear.outliers], name, ".order[", i, "] is ", from[i], ", expected ",
                      from[i - linear.outliers], ": outliers are there twice");
  return from;
}

// Where another linear of the layer has an equal order it is that one: which linears share their inputs, addresses tell.
inline void share_order(const DecoderLayer& l, Linear& linear) {
  l.each_linear([&](const Linear& other) {
    if (!other.order || other.columns() != linear.columns()) return;
    if (std::equal(other.order, other.order + linear.columns(), linear.order)) linear.order = other.order;
  });
}

// With NaN the rounds would neither ask for confidences nor do without them.
inline void check_threshold(const char* name, double threshold) {
  TORCH_CHECK_VALUE(!std::isnan(threshold), name, " is NaN, expected a probability, or 0 for none");
}

}  // namespace mlspec
