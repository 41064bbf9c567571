// Which experts may a layer of a compiled decoder hold? Stacked tensors, an expert a slice; messages name expert and sizes.
#pragma once
#include <memory>
#include <string>

#include "decoder_precisions.h"
#include "decoder_tensors.h"

namespace mlspec {

// router: float32 [count, with a shared expert that it weighs + 1][hidden], the last row that of the shared expert's gate; bias: one a
// row.
inline std::shared_ptr<Experts> routed_experts(const at::Tensor& router, const std::optional<at::Tensor>& bias, int64_t chosen,
                                               bool renormalize, bool has_shared, bool weighs_shared, int64_t hidden) {
  auto experts = std::make_shared<Experts>();
  experts->count = router.dim() == 2 ? router.size(0) - weighs_shared : 0;
  check_plain(router, "router", at::kFloat, {experts->count + weighs_shared, hidden});
  TORCH_CHECK_VALUE(has_shared || !weighs_shared, "router: it weighs a shared expert, and there is none");
  TORCH_CHECK_VALUE(experts->count >= 1 && chosen >= 1 && chosen <= experts->count, "router: each token chooses ", chosen, " of ",
                    experts->count, " experts");
  if (bias) check_plain(*bias, "router.bias", at::kFloat, {router.size(0)});
  experts->router = router.const_data_ptr<float>();
  experts->router_bias = bias ? bias->const_data_ptr<float>() : nullptr;
  experts->chosen = chosen, experts->renormalize = renormalize, experts->has_shared = has_shared;
  experts->weighs_shared = weighs_shared;
  return experts;
}

// Scores are sigmoids, of which groups are chosen first: Experts in cpu/decoder/decoder_experts.h.
inline void choose_by_sigmoids(Experts& experts, const at::Tensor& choice_bias, int64_t groups, int64_t chosen_groups, double scale) {
  check_plain(choice_bias, "choice_bias", at::kFloat, {experts.count});
  const int64_t size = groups > 0 ? experts.count / groups : 0;
  TORCH_CHECK_VALUE(groups >= 1 && groups <= kMostGroups && experts.count % groups == 0 && chosen_groups >= 1 && chosen_groups <= groups &&
                        (chosen_groups == groups || size >= 2) && experts.chosen <= chosen_groups * size,
                    "router: each token chooses ", experts.chosen, " of ", experts.count, " experts in ", chosen_groups, " of ", groups,
                    " groups: groups are equally large, of two or more, at most ", kMostGroups);
  TORCH_CHECK_VALUE(std::isfinite(scale), "router: scale is ", scale, ", expected a finite number");
  experts.sigmoids = true, experts.choice_bias = choice_bias.const_data_ptr<float>();
  experts.groups = groups, experts.chosen_groups = chosen_groups, experts.scale = static_cast<float>(scale);
}

inline void check_expert_place(const std::string& name, int64_t hidden, int64_t in, int64_t out) {
  TORCH_CHECK_VALUE(name == "up" ? in == hidden && out % 2 == 0 : name == "down" && out == hidden, "experts' ", name, " maps ", in,
                    " to ", out, " features, the decoder has ", hidden);
}

// One linear an expert, from tensors as check_weight takes them with a first axis of experts. name: up or down.
inline std::vector<Linear> expert_linears(const std::string& name, int64_t format, int64_t count, int64_t in, int64_t out,
                                          const at::Tensor& weight, const std::optional<at::Tensor>& scale,
                                          const std::optional<at::Tensor>& zero, const std::optional<at::Tensor>& bias,
                                          int64_t group, int64_t bits) {
  TORCH_CHECK_VALUE(weight.dim() >= 3 && weight.size(0) == count, name, " holds weights of shape ", weight.sizes(), ", expected ",
                    count, " experts");
  for (const std::optional<at::Tensor>* part : {&scale, &zero})
    TORCH_CHECK_VALUE(!*part || ((*part)->dim() >= 2 && (*part)->size(0) == count), name, " holds scales or zeros of shape ",
                      (*part)->sizes(), ", expected ", count, " experts");
  if (bias) check_plain(*bias, name + ".bias", at::kFloat, {count, out});
  std::vector<Linear> linears(count);
  for (int64_t expert = 0; expert < count; ++expert) {
    const auto own = [&](const std::optional<at::Tensor>& part) {
      return part ? std::optional(part->select(0, expert)) : std::nullopt;
    };
    const at::Tensor rows = weight.select(0, expert);
    const std::optional<at::Tensor> scales = own(scale), zeros = own(zero);
    Linear& linear = linears[expert];
    linear.format = static_cast<WeightFormat>(format);
    linear.in_features = in, linear.out_features = out, linear.group = group;
    linear.own = {!linear.is_packed() ? (linear.format == WeightFormat::kF32 ? 32 : 16) : 4, bits};
    check_weight(name + " of expert " + std::to_string(expert), linear, rows, scales, zeros);
    linear.weight = rows.const_data_ptr();
    if (scales) linear.scale = scales->const_data_ptr();
    if (zeros) linear.zero = zeros->const_data_ptr<uint8_t>();
    if (bias) linear.bias = bias->const_data_ptr<float>() + expert * out;
  }
  return linears;
}

// The same from tensors as nested_table takes them; codebook [experts, 8]; escape_rows [experts, k] and escape_weight [experts, k, in]:
// rows of each expert that are kept whole, or neither.
inline std::vector<Linear> nested_expert_linears(const std::string& name, int64_t count, int64_t in, int64_t out,
                                                 const NestedTensors& parts, const at::Tensor& codebook,
                                                 const std::optional<at::Tensor>& bias, Bits own) {
  const auto stacked = [&](const at::Tensor& part, const char* what, int64_t axes) {
    TORCH_CHECK_VALUE(part.dim() == axes && part.size(0) == count, name, ".", what, " has shape ", part.sizes(), ", expected ", count,
                      " experts");
  };
  stacked(parts.draft, "draft_tiles", 4), stacked(parts.exponents, "exponent_tiles", 4), stacked(parts.low, "low_tiles", 4);
  check_plain(codebook, name + ".codebook", at::kByte, {count, kCodebookLevels});
  if (parts.escape_rows) stacked(*parts.escape_rows, "escape_rows", 2);
  if (parts.escape_weight) stacked(*parts.escape_weight, "escape_weight", 3);
  if (bias) check_plain(*bias, name + ".bias", at::kFloat, {count, out});
  std::vector<Linear> linears(count);
  for (int64_t expert = 0; expert < count; ++expert) {
    const auto some = [&](const std::optional<at::Tensor>& part) {
      return part ? std::optional(part->select(0, expert)) : std::nullopt;
    };
    const std::string what = name + " of expert " + std::to_string(expert);
    const at::Tensor draft = parts.draft.select(0, expert), exponents = parts.exponents.select(0, expert);
    const at::Tensor low = parts.low.select(0, expert);
    const std::optional<at::Tensor> rows = some(parts.escape_rows), exact = some(parts.escape_weight);
    linears[expert] = nested_table(what, {draft, exponents, low, rows, exact}, in, out);
    linears[expert].own = own;
    check_bits(linears[expert], own, what + ": ");
    linears[expert].codebook = codebook.const_data_ptr<uint8_t>() + expert * kCodebookLevels;
    if (bias) linears[expert].bias = bias->const_data_ptr<float>() + expert * out;
  }
  return linears;
}

// The same from plane_tiles [experts, stored planes, tiles, in / 32, 64] and scale_tiles [experts, tiles, in / group, 16], of which
// num_planes are read where a call does not say.
inline std::vector<Linear> plane_expert_linears(const std::string& name, int64_t count, int64_t in, int64_t out, const at::Tensor& planes,
                                                const at::Tensor& scale, const std::optional<at::Tensor>& bias, int64_t group,
                                                int64_t zero_doubled, int64_t num_planes) {
  TORCH_CHECK_VALUE(planes.dim() == 5 && planes.size(0) == count && scale.dim() == 4 && scale.size(0) == count, name,
                    " holds bit-planes of shape ", planes.sizes(), " and scales of ", scale.sizes(), ", expected ", count, " experts");
  if (bias) check_plain(*bias, name + ".bias", at::kFloat, {count, out});
  std::vector<Linear> linears(count);
  for (int64_t expert = 0; expert < count; ++expert) {
    const std::string what = name + " of expert " + std::to_string(expert);
    linears[expert] = planes_linear(what, planes.select(0, expert), scale.select(0, expert), in, out, group, zero_doubled);
    linears[expert].own = {num_planes, 16};
    check_bits(linears[expert], linears[expert].own, what + ": ");
    if (bias) linears[expert].bias = bias->const_data_ptr<float>() + expert * out;
  }
  return linears;
}

inline Linear& shared_linear(Experts& experts, const std::string& name) {
  if (name == "shared_gate") return experts.shared_gate;
  TORCH_CHECK_VALUE(name == "shared_up" || name == "shared_down", "a layer has no linear ", name);
  return name == "shared_up" ? experts.shared_up : experts.shared_down;
}

// f(linear) for one linear of each kind: the experts of a layer are alike.
template <class F>
void each_expert_linear(const Experts& experts, F&& f) {
  f(experts.up[0]);
  f(experts.down[0]);
  if (!experts.has_shared) return;
  for (const Linear* linear : {&experts.shared_gate, &experts.shared_up, &experts.shared_down}) f(*linear);
}

// All projections there, and of sizes that fit together.
inline void check_experts(const Experts& e, Bits bits, const std::string& what) {
  const auto count = static_cast<size_t>(e.count);
  TORCH_CHECK_VALUE(e.up.size() == count && e.down.size() == count, what, " has not both projections of its ", count, " experts yet");
  TORCH_CHECK_VALUE(e.up[0].out_features == 2 * e.down[0].in_features, what, ": its experts' gate and up have ",
                    e.up[0].out_features, " outputs, down ", e.down[0].in_features, " inputs");
  if (!e.has_shared) return;
  TORCH_CHECK_VALUE(!e.in_turns, what, " has a shared expert beside experts whose gate and up come in turns");
  const Linear &gate = e.shared_gate, &up = e.shared_up, &down = e.shared_down;
  for (const Linear* linear : {&gate, &up, &down})
    TORCH_CHECK_VALUE(linear->weight && !linear->order && !linear->outliers && !linear->rotates(), what,
                      ": its shared expert is not whole, or transforms its inputs");
  for (const Linear* linear : {&gate, &up, &down})
    TORCH_CHECK_VALUE(linear->format != WeightFormat::kZipper && !linear->escaped.count && !linear->resident_planes, what,
                      ": its shared expert has a sparse part, whole rows beside its fields, or planes that are streamed");
  TORCH_CHECK_VALUE(gate.format == up.format && gate.group == up.group && gate.at(bits) == up.at(bits) &&
                        gate.out_features == up.out_features && up.out_features == down.in_features,
                    what, ": gate, up and down of its shared expert do not fit together");
}

}  // namespace mlspec
