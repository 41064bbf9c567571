// How does Python hold a compiled decoder? A class of torch.classes: built once from a model's tensors, one call per step.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <new>
#include <string>

#include "decoder_level.h"
#include "decoder_rows.h"
#include "zipper_table.h"
#include "../operands.h"
#include "../../cpu/attention/attention_limits.h"
#include "../../cpu/decoder/decoder_rounds.h"

namespace {

using at::Tensor;
using mlspec::check_plain;
using mlspec::DecoderLayer;
using mlspec::storage_dtype, mlspec::as_tensor;
using Ints = std::vector<int64_t>;
using MaybeTensor = std::optional<Tensor>;

// What a call computes, or OutOfMemoryError naming the call and what there is no memory for, RuntimeError where a pass
// failed. The decoder stays as it was.
template <class Compute>
auto in_memory(const char* call, const Ints& tokens, const Ints& counts, Compute&& compute) {
  try {
    return compute();
  } catch (const std::bad_alloc&) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, call, ": no memory for the activations of ", tokens.size(), " tokens in ",
                     counts.size(), " rows: pass fewer tokens or rows at a time, or free what else is in memory");
  } catch (const mlspec::PassFailed& failed) {
    TORCH_CHECK(false, call, ": ", failed.what());
  }
}

class DecoderObject : public torch::CustomClassHolder {
 public:
  // embedding without elements: set_nested_embedding or set_zipper_embedding follows, for a table of bfloat16.
  DecoderObject(const Ints& dims, const std::vector<double>& numbers, const Tensor& embedding, const Tensor& final_norm,
                const MaybeTensor& final_bias) {
    TORCH_CHECK_VALUE(dims.size() == 18 && numbers.size() == 5, "Decoder takes 18 sizes and 5 numbers, got ",
                      dims.size(), " and ", numbers.size());
    mlspec::DecoderShape& s = decoder_.shape;
    s.hidden = dims[0], s.heads = dims[1], s.kv_heads = dims[2], s.head_dim = dims[3], s.intermediate = dims[4];
    s.vocab = dims[5], s.embeddings = dims[6], s.rotary_dim = dims[7];
    s.activation = static_cast<mlspec_activation>(dims[8]);
    s.kv_dtype = dims[9] ? MLSPEC_BFLOAT16 : MLSPEC_FLOAT32;
    s.norms_have_mean = dims[10], s.rotates_pairs = dims[11], s.parallel = dims[12], s.grouped_qkv = dims[13];
    s.norms_behind_rotation = dims[14], s.plain_mlp = dims[15], s.gated_heads = dims[16], s.no_mlp = dims[17];
    TORCH_CHECK_VALUE(!s.gated_heads || !s.grouped_qkv, "heads with gates are not grouped by key head");
    s.positions = 0;
    s.norm_eps = numbers[0], s.embedding_scale = numbers[1], s.attention_scale = numbers[2];
    s.attention_softcap = numbers[3], s.logit_softcap = numbers[4];
    TORCH_CHECK_VALUE(s.hidden > 0 && s.kv_heads > 0 && s.heads > 0 && s.heads % s.kv_heads == 0 && s.head_dim > 0 &&
                          s.head_dim <= mlspec::kMaxHeadDim && s.intermediate > 0 && s.vocab > 0 && s.embeddings > 0 &&
                          dims[8] >= MLSPEC_SILU && dims[8] <= MLSPEC_RELU_SQUARED && s.rotary_dim > 0 &&
                          s.rotary_dim <= s.head_dim && s.rotary_dim % 2 == 0,
                      "Decoder: impossible sizes ", at::IntArrayRef(dims));
    s.embedding_dtype = storage_dtype(embedding, "the embedding");
    if (embedding.numel() > 0) {
      check_plain(embedding, "the embedding", embedding.scalar_type(), {s.embeddings, s.hidden});
      decoder_.embedding = hold(embedding);
    }
    decoder_.final_norm = {floats(final_norm, "the final norm", s.hidden), floats(final_bias, "its bias", s.hidden)};
    mlspec::cpu_kernels();  // throws where MLSPEC_CPU_ISA asks for what is not here; a parallel region cannot
  }

  // cos, sin: float32 [positions, half], of heads whose first 2 half elements are rotated; table `index` is added or replaced.
  void set_rope(int64_t index, const Tensor& cos, const Tensor& sin) {
    const int64_t half = cos.dim() == 2 ? cos.size(1) : 0;
    TORCH_CHECK_VALUE(half > 0 && 2 * half <= decoder_.shape.head_dim, "cos has shape ", cos.sizes(), ", expected [positions, half], half at "
                      "most ", decoder_.shape.head_dim / 2);
    check_plain(cos, "cos", at::kFloat, {cos.size(0), half});
    check_plain(sin, "sin", at::kFloat, {cos.size(0), half});
    std::lock_guard<std::mutex> lock(decoder_.busy);  // another thread may be reading the table that is replaced
    const int64_t known = decoder_.ropes.size();
    TORCH_CHECK_INDEX(index >= 0 && index <= known, "rope table ", index, " of ", known);
    if (index == known) decoder_.ropes.emplace_back(), rope_tensors_.emplace_back();
    rope_tensors_[index] = {cos, sin};
    decoder_.ropes[index] = {cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), half};
    int64_t least = num_position_rows_ ? std::min(num_position_rows_, cos.size(0)) : cos.size(0);
    for (const auto& pair : rope_tensors_) least = std::min(least, pair.first.size(0));
    decoder_.shape.positions = least;
  }

  // [positions, hidden] of the embedding's dtype, before set_rope: added to the embedding of a token at each position.
  void set_position_embedding(const Tensor& table) {
    TORCH_CHECK_VALUE(rope_tensors_.empty(), "the embedding of positions comes before rope tables");
    const auto& s = decoder_.shape;
    check_plain(table, "the embedding of positions", s.embedding_dtype == MLSPEC_FLOAT32 ? at::kFloat : at::kBFloat16,
                {table.size(0), s.hidden});
    num_position_rows_ = table.size(0);
    decoder_.position_embedding = hold(table);
  }

  // Of layers that are added from now on: key heads, elements of a head, elements between the projections of an MLP; at most the decoder's.
  void set_layer_sizes(int64_t kv_heads, int64_t head_dim, int64_t intermediate) {
    const auto& s = decoder_.shape;
    TORCH_CHECK_VALUE(kv_heads > 0 && kv_heads <= s.kv_heads && s.heads % kv_heads == 0 && head_dim > 0 && head_dim <= s.head_dim &&
                          intermediate > 0 && intermediate <= s.intermediate,
                      "set_layer_sizes: ", kv_heads, " key heads of ", head_dim, " elements and ", intermediate,
                      " between projections; the decoder has room for ", s.kv_heads, ", ", s.head_dim, " and ", s.intermediate);
    own_ = {kv_heads, head_dim, intermediate}, decoder_.layers_differ = true;
  }

  // The newest layer, before its linears, reads keys and values of an earlier one, and has no k and v of its own.
  void reuse_keys(int64_t of) {
    DecoderLayer& layer = newest("k");
    const int64_t before = decoder_.layers.size() - 1;
    TORCH_CHECK_INDEX(of >= 0 && of < before, "layer ", before, " reads the keys of layer ", of, ", which is none before it");
    const DecoderLayer& other = decoder_.layers[of];
    TORCH_CHECK_VALUE(!other.delta && !other.reuses_keys && other.kv_heads == layer.kv_heads && other.head_dim == layer.head_dim &&
                          !decoder_.shape.grouped_qkv,
                      "layer ", before, " has ", layer.kv_heads, " key heads of ", layer.head_dim, " elements, layer ", of,
                      " has no such keys and values of its own");
    layer.reuses_keys = true, layer.kv_index = other.kv_index;
  }

  // Of the newest layer, before its linears. norm: float32 [head_dim], of values; keys: they are what k computes, and there is no v.
  void set_values(const MaybeTensor& norm, bool keys) {
    DecoderLayer& layer = newest("v");
    TORCH_CHECK_VALUE(!keys || !decoder_.shape.grouped_qkv, "values that are keys are not grouped by key head");
    layer.v_norm = {floats(norm, "v_norm", layer.head_dim), nullptr}, layer.values_are_keys = keys;
  }

  // Of the newest layer. span: a token sees no slot before the last multiple of it, 0: no such bound. scale, stretch: QueryScale.
  void set_view(int64_t span, double scale, double stretch) {
    TORCH_CHECK_VALUE(span >= 0 && std::isfinite(scale) && stretch > 0 && std::isfinite(stretch), "set_view: span is ", span, ", scale ",
                      scale, " and stretch ", stretch);
    DecoderLayer& layer = newest("view");
    layer.span = span, layer.query_scale = {static_cast<float>(scale), static_cast<float>(stretch)};
  }

  // What the residual stream is multiplied by behind the newest layer.
  void set_scale(double scale) {
    TORCH_CHECK_VALUE(std::isfinite(scale) && !decoder_.shape.parallel && !decoder_.shape.no_mlp,
                      "set_scale: ", scale, ", expected a number, of layers whose MLP is behind their attention");
    newest("scale").scale = static_cast<float>(scale);
  }

  // TokenInputs in decoder_inputs.h, before the linear token_inputs: table [embeddings, layers * width] of the embedding's dtype, whose rows
  // may lie apart; norm: float32 [width].
  void set_token_inputs(const Tensor& table, const Tensor& norm, int64_t width, double eps, double scale) {
    const auto& s = decoder_.shape;
    TORCH_CHECK_VALUE(width > 0 && eps >= 0 && std::isfinite(scale) && table.dim() == 2 && table.size(0) >= s.embeddings &&
                          table.size(1) % width == 0 && table.stride(1) == 1 && table.stride(0) >= table.size(1) && table.is_cpu(),
                      "the inputs of layers have a table of shape ", table.sizes(), " with strides ", table.strides(), ", expected ",
                      s.embeddings, " rows of some layers' ", width, " elements on the CPU");
    TORCH_CHECK_TYPE(storage_dtype(table, "the table of layers' inputs") == s.embedding_dtype, "the table of layers' inputs is ",
                     table.scalar_type(), ", and the embedding is not");
    mlspec::TokenInputs& own = decoder_.token_inputs;
    own.norm_weight = floats(norm, "the norm of layers' inputs", width);
    own.norm_eps = static_cast<float>(eps), own.scale = static_cast<float>(scale);
    own.table = hold(table), own.stride = table.stride(0), own.width = width;
    own.projection.in_features = s.hidden, own.projection.out_features = table.size(1);
  }

  // The newest layer has inputs of its own; its linears inputs_gate and inputs_out follow. norm: float32 [hidden], behind the latter.
  void set_inputs(const MaybeTensor& norm) {
    TORCH_CHECK_VALUE(decoder_.token_inputs && !decoder_.shape.parallel && !decoder_.shape.no_mlp && !decoder_.ranks.sum,
                      "set_inputs: set_token_inputs comes first, and the MLP of a layer behind its attention, in one process");
    newest("inputs").inputs = std::make_shared<mlspec::LayerInputs>();
    decoder_.layers.back().inputs->out_norm = {floats(norm, "the norm behind a layer's inputs", decoder_.shape.hidden), nullptr};
  }

  // norms: attention, mlp, attention_out, mlp_out, q, k, then the biases of these; float32 with any +1 added. q and k: of a head, or
  // of all heads. sinks: float32 [heads], scores that are part of the softmax of a head and have no value.
  void add_layer(const std::vector<MaybeTensor>& norms, int64_t window, int64_t rope_table, const MaybeTensor& sinks) {
    TORCH_CHECK_VALUE(norms.size() == 12, "a layer has 6 norms and 6 biases of norms, got ", norms.size());
    TORCH_CHECK_VALUE(window >= 0, "window is ", window, ", 0 (full attention) or more is meant");
    TORCH_CHECK_INDEX(rope_table >= 0 && rope_table < static_cast<int64_t>(decoder_.ropes.size()), "rope table ", rope_table);
    const auto& s = decoder_.shape;
    DecoderLayer layer;
    layer.kv_heads = own_[0] ? own_[0] : s.kv_heads, layer.head_dim = own_[1] ? own_[1] : s.head_dim;
    layer.intermediate = own_[2] ? own_[2] : s.intermediate;
    TORCH_CHECK_VALUE(2 * decoder_.ropes[rope_table].half <= layer.head_dim, "rope table ", rope_table, " rotates ",
                      2 * decoder_.ropes[rope_table].half, " elements of heads of ", layer.head_dim);
    layer.q_norm_width = norms[4] && norms[4]->numel() > layer.head_dim ? s.heads * layer.head_dim : layer.head_dim;
    layer.k_norm_width = norms[5] && norms[5]->numel() > layer.head_dim ? layer.kv_heads * layer.head_dim : layer.head_dim;
    const auto norm = [&](int i, const std::string& what, int64_t size) {
      return mlspec::Norm{floats(norms[i], what, size), floats(norms[6 + i], what + ".bias", size)};
    };
    layer.attention_norm = norm(0, "attention_norm", s.hidden), layer.mlp_norm = norm(1, "mlp_norm", s.hidden);
    layer.attention_out_norm = norm(2, "attention_out_norm", s.hidden), layer.mlp_out_norm = norm(3, "mlp_out_norm", s.hidden);
    layer.q_norm = norm(4, "q_norm", layer.q_norm_width), layer.k_norm = norm(5, "k_norm", layer.k_norm_width);
    layer.sinks = floats(sinks, "sinks", s.heads);
    layer.window = window;
    layer.rope_table = rope_table;
    layer.kv_index = decoder_.num_kv_layers();
    decoder_.layers.push_back(layer);
  }

  // Sizes of all layers that are gated delta nets, or of Mamba-2: delta_shape in decoder_delta.h. Before the first of them.
  void set_delta_shape(const Ints& dims) {
    TORCH_CHECK_VALUE(decoder_.delta_nets.empty(), "the sizes of gated delta nets come before the nets");
    decoder_.delta = mlspec::delta_shape(dims);
  }

  // The newest layer is a gated delta net in place of attention. taps: float32 [taps, channels], of the oldest token first; rate (-exp(A_log))
  // and shift: float32 [value_heads]; norm: float32 [value_dim], of Mamba-2 [values], with eps; of Mamba-2 there are skip, [value_heads], and
  // perhaps bias, [channels] of the convolution. Its linears follow: delta_qkv, _z, _b, _a and _out, of a grouped one delta_qkv, _b and _out, of
  // Mamba-2 delta_qkv and _out.
  void set_delta(const Tensor& taps, const Tensor& rate, const Tensor& shift, const Tensor& norm, double eps, const MaybeTensor& bias,
                 const MaybeTensor& skip) {
    DecoderLayer& layer = newest("delta");
    const mlspec::DeltaShape& s = decoder_.delta;
    TORCH_CHECK_VALUE(s.key_heads > 0 && !layer.delta, "a layer is a gated delta net once, and set_delta_shape comes first");
    check_plain(taps, "taps", at::kFloat, {s.num_taps, s.channels()});
    layer.delta = std::make_shared<mlspec::DeltaNet>();
    layer.delta->index = decoder_.delta_nets.size();
    layer.delta->taps = static_cast<const float*>(hold(taps));
    layer.delta->rate = floats(rate, "rate", s.value_heads), layer.delta->shift = floats(shift, "shift", s.value_heads);
    layer.delta->norm = floats(norm, "the norm of a delta net", s.additive ? s.values() : s.value_dim);
    TORCH_CHECK_VALUE(eps >= 0 && s.additive == skip.has_value() && (s.additive || !bias), "a layer of Mamba-2 has skip, a gated delta net "
                      "neither skip nor bias, and eps is 0 or a positive number");
    layer.delta->bias = floats(bias, "the bias of a convolution", s.channels()), layer.delta->skip = floats(skip, "skip", s.value_heads);
    layer.delta->eps = static_cast<float>(eps);
    decoder_.delta_nets.push_back(layer.delta.get());
  }

  // Of tensors as checked_states in decoder_delta.h takes them: of how many of its first wanted[r] tokens row r has a state, or can have one.
  Ints reach(const std::vector<Tensor>& states, const Ints& wanted) {
    TORCH_CHECK_VALUE(states.size() == 3, "there are 3 tensors of states, got ", states.size());
    const mlspec::RecurrentStates own = mlspec::checked_states(decoder_, states.data());
    TORCH_CHECK_VALUE(static_cast<int64_t>(wanted.size()) <= own.batch, "there are states of ", own.batch, " rows");
    Ints found(wanted.size());
    for (size_t r = 0; r < wanted.size(); ++r) own.nearest(r, wanted[r], found[r]);
    return found;
  }

  // The newest layer has experts in place of gate, up and down: routed_experts in decoder_experts.h. set_experts follows.
  void set_router(const Tensor& router, const MaybeTensor& bias, int64_t chosen, bool renormalize, bool has_shared,
                  bool weighs_shared) {
    newest("router").experts =
        mlspec::routed_experts(router, bias, chosen, renormalize, has_shared, weighs_shared, decoder_.shape.hidden);
    hold(router), hold_some(bias, std::nullopt);
  }

  // Of the newest layer's experts, which set_router has begun. choice_bias: float32 [count], of the choice alone.
  void set_sigmoids(const Tensor& choice_bias, int64_t groups, int64_t chosen_groups, double scale) {
    mlspec::choose_by_sigmoids(newest_experts("sigmoids"), choice_bias, groups, chosen_groups, scale);
    hold(choice_bias);
  }

  // Of the newest layer's experts, which set_router has begun: weights multiply what experts read.
  void weigh_inputs() { newest_experts("weigh_inputs").weighs_inputs = true; }

  // Of the newest layer's experts, which set_router has begun: rows of gate and up come in turns (mlspec_row_ops::gate_pairs).
  void set_pairs(double slope, double limit) {
    TORCH_CHECK_VALUE(std::isfinite(slope) && limit > 0 && std::isfinite(limit), "set_pairs: slope is ", slope, " and limit ", limit,
                      ", expected finite numbers, the limit above 0");
    mlspec::Experts& experts = newest_experts("pairs");
    experts.in_turns = true, experts.slope = static_cast<float>(slope), experts.limit = static_cast<float>(limit);
  }

  // name: up ([experts, 2 inner, hidden]: rows of gate, then of up, or in turns) or down, with a first axis of experts in every tensor.
  void set_experts(const std::string& name, int64_t format, int64_t in, int64_t out, const Tensor& weight, const MaybeTensor& scale,
                   const MaybeTensor& zero, const MaybeTensor& bias, int64_t group, int64_t bits) {
    mlspec::check_expert_place(name, decoder_.shape.hidden, in, out);
    mlspec::Experts& experts = newest_experts(name);
    (name == "up" ? experts.up : experts.down) =
        mlspec::expert_linears("experts' " + name, format, experts.count, in, out, weight, scale, zero, bias, group, bits);
    hold(weight), hold_some(scale, zero), hold_some(bias, std::nullopt);
  }

  // The same for nested weights: nested_expert_linears in decoder_experts.h; bits as of set_nested.
  void set_nested_experts(const std::string& name, int64_t in, int64_t out, const Tensor& draft_tiles, const Tensor& exponent_tiles,
                          const Tensor& low_tiles, const Tensor& codebook, const MaybeTensor& escape_rows,
                          const MaybeTensor& escape_weight, const MaybeTensor& bias, int64_t weight_bits, int64_t activation_bits) {
    mlspec::check_expert_place(name, decoder_.shape.hidden, in, out);
    mlspec::Experts& experts = newest_experts(name);
    const mlspec::NestedTensors parts{draft_tiles, exponent_tiles, low_tiles, escape_rows, escape_weight};
    (name == "up" ? experts.up : experts.down) = mlspec::nested_expert_linears("experts' " + name, experts.count, in, out, parts, codebook,
                                                                               bias, {weight_bits, activation_bits});
    hold(codebook), hold_parts(parts), hold_some(bias, std::nullopt);
  }

  // The same for bit-planes: plane_expert_linears in decoder_experts.h; num_planes as of set_planes.
  void set_plane_experts(const std::string& name, int64_t in, int64_t out, const Tensor& plane_tiles, const Tensor& scale_tiles,
                         const MaybeTensor& bias, int64_t group, int64_t zero_doubled, int64_t num_planes) {
    mlspec::check_expert_place(name, decoder_.shape.hidden, in, out);
    mlspec::Experts& experts = newest_experts(name);
    (name == "up" ? experts.up : experts.down) = mlspec::plane_expert_linears(
        "experts' " + name, experts.count, in, out, plane_tiles, scale_tiles, bias, group, zero_doubled, num_planes);
    hold(plane_tiles), hold(scale_tiles), hold_some(bias, std::nullopt);
  }

  // name: q, k, v, o, gate, up, down of the newest layer, delta_* of a gated delta net, shared_gate, _up, _down of its experts, or head. format: WeightFormat.
  void set_linear(const std::string& name, int64_t format, int64_t in, int64_t out, const Tensor& weight,
                  const MaybeTensor& scale, const MaybeTensor& zero, const MaybeTensor& bias, int64_t group, int64_t bits) {
    mlspec::Linear linear;
    linear.format = static_cast<mlspec::WeightFormat>(format);
    linear.in_features = in, linear.out_features = out, linear.group = group;
    linear.own = {!linear.is_packed() ? (linear.format == mlspec::WeightFormat::kF32 ? 32 : 16) : 4, bits};
    mlspec::check_weight(name, linear, weight, scale, zero);
    linear.weight = hold(weight);
    if (scale) linear.scale = hold(*scale);
    if (zero) linear.zero = static_cast<const uint8_t*>(hold(*zero));
    put(name, linear, bias);
  }

  // The same for a nested weight; weight_bits 16 and activation_bits 16, 4 and 16, or 4 and 8 where a call does not say.
  void set_nested(const std::string& name, int64_t in, int64_t out, const Tensor& draft_tiles, const Tensor& exponent_tiles,
                  const Tensor& low_tiles, const Tensor& codebook, const MaybeTensor& escape_rows,
                  const MaybeTensor& escape_weight, const MaybeTensor& bias, int64_t weight_bits, int64_t activation_bits) {
    const mlspec::NestedTensors parts{draft_tiles, exponent_tiles, low_tiles, escape_rows, escape_weight};
    mlspec::Linear linear = mlspec::nested_table(name, parts, in, out);
    check_plain(codebook, name + ".codebook", at::kByte, {mlspec::kCodebookLevels});
    linear.own = {weight_bits, activation_bits};
    mlspec::check_bits(linear, linear.own, name + ": ");
    linear.codebook = static_cast<const uint8_t*>(hold(codebook));
    hold_parts(parts);
    put(name, linear, bias);
  }

  // The same for a weight of bit-planes; num_planes are read where a call does not say.
  void set_planes(const std::string& name, int64_t in, int64_t out, const Tensor& plane_tiles, const Tensor& scale_tiles,
                  const MaybeTensor& bias, int64_t group, int64_t zero_doubled, int64_t num_planes) {
    mlspec::Linear linear = mlspec::planes_linear(name, plane_tiles, scale_tiles, in, out, group, zero_doubled);
    linear.own = {num_planes, 16};
    mlspec::check_bits(linear, linear.own, name + ": ");
    hold(plane_tiles), hold(scale_tiles);
    put(name, linear, bias);
  }

  // The same for lookup-table planes.
  void set_lut(const std::string& name, int64_t in, int64_t out, const Tensor& plane_tiles, const Tensor& table_tiles,
               const MaybeTensor& bias, int64_t num_planes) {
    mlspec::Linear linear = mlspec::lut_linear(name, plane_tiles, table_tiles, in, out);
    linear.own = {num_planes, 16};
    mlspec::check_bits(linear, linear.own, name + ": ");
    hold(plane_tiles), hold(table_tiles);
    put(name, linear, bias);
  }

  // The same for a weight in a low part, planes or int4, and a sparse high one.
  void set_zipper(const std::string& name, int64_t in, int64_t out, const Tensor& plane_tiles, const Tensor& scale_tiles,
                  const Tensor& high, const MaybeTensor& bias, int64_t group, int64_t bits, int64_t activation_bits) {
    mlspec::Linear linear = mlspec::zipper_linear(name, plane_tiles, scale_tiles, high, in, out, group);
    linear.own = {bits, activation_bits};
    mlspec::check_bits(linear, linear.own, name + ": ");
    hold(plane_tiles), hold(scale_tiles), hold(high);
    put(name, linear, bias);
  }

  // The same for int4 columns with int8 outliers; set_order has to follow, and names outliers twice.
  void set_outliers(const std::string& name, int64_t in, int64_t out, const Tensor& weight, const Tensor& scale,
                    const MaybeTensor& bias, int64_t bits) {
    const mlspec::Linear linear = mlspec::outlier_linear(name, in, out, weight, scale, bits);
    hold(weight), hold(scale);
    put(name, linear, bias);
  }

  // Of the linear `name`, in bit-planes and set before: `resident` of its planes are always in their place, the others between calls of
  // begin and end with `key`. See set_plane_reader.
  void set_streamed(const std::string& name, int64_t resident, int64_t key) {
    mlspec::Linear& linear = place(name);
    TORCH_CHECK_VALUE(linear.weight && linear.format == mlspec::WeightFormat::kPlanes, name,
                      ".streamed: only bit-planes are streamed; set the linear first");
    TORCH_CHECK_VALUE(decoder_.planes.begin, name, ".streamed: set_plane_reader comes first");
    TORCH_CHECK_VALUE(resident >= 1 && resident <= linear.stored_planes, name, ".streamed: ", resident, " of ",
                      linear.stored_planes, " planes are resident");
    TORCH_CHECK_VALUE(key != 0, name, ".streamed: key is 0, that of all that are not streamed");
    linear.resident_planes = resident, linear.key = key;
  }

  // Addresses of C functions, bool(int64 key, int64 planes) and void(int64 key), that live as long as the decoder: mlspec::PlaneReader.
  void set_plane_reader(int64_t begin, int64_t end) {
    TORCH_CHECK_VALUE(begin && end, "a reader of planes has two functions");
    decoder_.planes = {reinterpret_cast<decltype(mlspec::PlaneReader::begin)>(begin),
                       reinterpret_cast<decltype(mlspec::PlaneReader::end)>(end)};
  }

  // Addresses of C functions, bool(float* data, int64 count) and bool(const float* part, int64 rows, int64 width, float* whole), that live
  // as long as the decoder: mlspec::Ranks. Before the head.
  void set_ranks(int64_t count, int64_t sum, int64_t gather) {
    TORCH_CHECK_VALUE(count > 1 && sum && gather && !decoder_.head.weight,
                      "set_ranks takes 2 or more processes and two functions, before the head; got ", count);
    decoder_.ranks = {reinterpret_cast<decltype(mlspec::Ranks::sum)>(sum), reinterpret_cast<decltype(mlspec::Ranks::gather)>(gather),
                      count};
  }

  // Of the linear `name`, which was set before: column i of its weight multiplies element order[i] of the input. int32 [columns].
  // Where another linear of the layer has an equal one it is that one: which linears share their inputs, addresses tell.
  void set_order(const std::string& name, const Tensor& order) {
    mlspec::Linear& linear = place(name);
    linear.order = mlspec::checked_order(name, linear, order);
    hold(order);
    if (name != "head") mlspec::share_order(decoder_.layers.back(), linear);
  }

  // Of the int4 linear `name`, which was set before: how 4-bit codes of its activations are clipped.
  void set_activation_clip(const std::string& name, double clip) {
    mlspec::Linear& linear = place(name);
    TORCH_CHECK_VALUE(linear.weight && linear.format == mlspec::WeightFormat::kInt4, name,
                      ".activation_clip: only int4 weights meet 4-bit activations; set the linear first");
    mlspec::check_activation_clip(name.c_str(), clip);
    linear.activation_clip = static_cast<float>(clip);
  }

  // Of o or down, which was set before: its inputs are multiplied by Hadamard matrices first, as hadamard_rows does it.
  void set_hadamard(const std::string& name, const MaybeTensor& matrix, int64_t size, int64_t inner) {
    TORCH_CHECK_VALUE(name == "o" || name == "down" || name == "delta_out", name, ".hadamard: o and down have rotated inputs, others do not");
    mlspec::Linear& linear = place(name);
    TORCH_CHECK_VALUE(linear.weight && !linear.adapter && (!linear.order || linear.outliers), name,
                      ".hadamard: set the linear first, no adapter, and no order of its inputs but that of outliers");
    linear.hadamard = mlspec::checked_hadamard((name + ".hadamard").c_str(), linear.in_features, matrix, size, inner);
    if (matrix) hold(*matrix);
  }

  // Of a layer's linear, which was set before: it adds up (down x) to its outputs. down float32 [rank, in], up float32 [out, rank].
  void set_adapter(const std::string& name, const Tensor& down, const Tensor& up) {
    const bool beside = name == "head" || name.rfind("shared_", 0) == 0 || name.rfind("delta_", 0) == 0 || name.find("inputs") != name.npos;
    TORCH_CHECK_VALUE(!beside, name, ".adapter: only q, k, v, o, gate, up, down have one");
    mlspec::Linear& linear = place(name);
    linear.adapter = mlspec::checked_adapter(name, linear, down, up);
    hold(down), hold(up);
  }

  void set_nested_embedding(const Tensor& draft_tiles, const Tensor& exponent_tiles, const Tensor& low_tiles,
                            const MaybeTensor& escape_rows, const MaybeTensor& escape_weight) {
    const mlspec::NestedTensors parts{draft_tiles, exponent_tiles, low_tiles, escape_rows, escape_weight};
    const auto& s = decoder_.shape;
    TORCH_CHECK_VALUE(!decoder_.embedding && s.embedding_dtype == MLSPEC_BFLOAT16,
                      "a nested table takes the place of a bfloat16 embedding without rows; this decoder was built with ",
                      decoder_.embedding ? "all of its rows" : "one of float32");
    decoder_.nested_embedding = mlspec::nested_table("the embedding", parts, s.hidden, s.embeddings);
    hold_parts(parts);
  }

  // A table of codes (hf_mlspec/formats/zipper/rows.py) in place of a bfloat16 embedding without rows.
  void set_zipper_embedding(const Tensor& planes, const Tensor& step, const Tensor& places, int64_t lowest) {
    const auto& s = decoder_.shape;
    TORCH_CHECK_VALUE(!decoder_.embedding && s.embedding_dtype == MLSPEC_BFLOAT16,
                      "a table of codes takes the place of a bfloat16 embedding without rows; this decoder was built with ",
                      decoder_.embedding ? "all of its rows" : "one of float32");
    const mlspec::CodeRows sizes = mlspec::checked_table("the embedding", planes, step, places, lowest);
    TORCH_CHECK_VALUE(sizes.rows == s.embeddings && sizes.width == s.hidden, "the embedding has ", sizes.rows, " rows of ", sizes.width,
                      ", expected ", s.embeddings, " of ", s.hidden);
    for (const Tensor* part : {&planes, &step, &places}) mlspec::check_cpu("the embedding", "a part", *part), hold(*part);
    decoder_.zipper_embedding = mlspec::table_of_codes(sizes, planes, step, places, lowest);
  }

  // int4 weights at 16 bits: to bfloat16 in memory first; the other linears stay as they are.
  void set_dequantize(bool dequantize) {
    std::lock_guard<std::mutex> lock(decoder_.busy);
    decoder_.dequantize = dequantize;
  }

  // Feeds counts[r] tokens of row r from slot starts[r] on and scores the last kept[r] of them. weight_bits and activation_bits,
  // in every call: what all linears with packed weights read and multiply (mlspec::check_bits), or 0, each one's own. draft_window:
  // what each token sees of what is before it, as in mlspec_attention_args.
  // -> best int64 [sum of kept] (-1: NaN), confidence float32 (empty unless wanted), logits float32 (empty unless wanted)
  std::tuple<Tensor, Tensor, Tensor> score(const Tensor& kv, const Ints& tokens, const Ints& counts, const Ints& starts,
                                           const Ints& kept, bool want_confidence, bool want_logits,
                                           int64_t weight_bits, int64_t activation_bits, int64_t draft_window,
                                           const std::vector<Tensor>& states, const Ints& sources) {
    return score_tapped(kv, tokens, counts, starts, kept, want_confidence, want_logits, weight_bits, activation_bits,
                        draft_window, states, sources, {}, std::nullopt);
  }

  // The same, and the residual stream of every token fed, in front of tap_layers, goes to its row and position of tap_states
  // [rows, slots, layers, hidden], of the cache's dtype. No layers: nothing is written.
  std::tuple<Tensor, Tensor, Tensor> score_tapped(const Tensor& kv, const Ints& tokens, const Ints& counts,
                                                  const Ints& starts, const Ints& kept, bool want_confidence,
                                                  bool want_logits, int64_t weight_bits, int64_t activation_bits,
                                                  int64_t draft_window, const std::vector<Tensor>& states,
                                                  const Ints& sources, const Ints& tap_layers,
                                                  const MaybeTensor& tap_states) {
    std::lock_guard<std::mutex> lock(decoder_.busy);
    mlspec::Level level =
        mlspec::checked_level(decoder_, kv, starts, {weight_bits, activation_bits}, draft_window, {states, sources});
    level.tap = mlspec::checked_tap(decoder_, mlspec::split_rows(tokens, counts, starts), tap_layers, tap_states);
    return scored("score", level, tokens, counts, starts, kept, want_confidence, want_logits);
  }

  // score of the last token of every row that has any, and of all nodes of the tree behind it: node_counts[r] of row r, depth first, at
  // depths as in TokenRow, which says where their keys and values go. Layers keep no states.
  std::tuple<Tensor, Tensor, Tensor> score_tree(const Tensor& kv, const Ints& tokens, const Ints& counts, const Ints& starts,
                                                const Ints& nodes, const Ints& depths, const Ints& node_counts, bool want_confidence,
                                                bool want_logits, int64_t weight_bits, int64_t activation_bits, int64_t draft_window) {
    return score_tree_tapped(kv, tokens, counts, starts, nodes, depths, node_counts, want_confidence, want_logits, weight_bits,
                             activation_bits, draft_window, {}, std::nullopt);
  }

  // The same with a tap as of score_tapped: what belongs to a node goes to the slot of its keys and values.
  std::tuple<Tensor, Tensor, Tensor> score_tree_tapped(const Tensor& kv, const Ints& tokens, const Ints& counts, const Ints& starts,
                                                       const Ints& nodes, const Ints& depths, const Ints& node_counts,
                                                       bool want_confidence, bool want_logits, int64_t weight_bits,
                                                       int64_t activation_bits, int64_t draft_window, const Ints& tap_layers,
                                                       const MaybeTensor& tap_states) {
    std::lock_guard<std::mutex> lock(decoder_.busy);
    TORCH_CHECK_VALUE(decoder_.delta_nets.empty(), "score_tree: layers that keep a state go through rows alone");
    mlspec::Level level = mlspec::checked_level(decoder_, kv, starts, {weight_bits, activation_bits}, draft_window);
    auto rows = mlspec::split_rows(tokens, counts, starts);
    Ints kept(rows.size());
    for (size_t r = 0; r < rows.size(); ++r) kept[r] = counts[r] > 0;
    mlspec::check_room(level, rows, kept, Ints(rows.size(), 0));
    mlspec::put_trees(level, nodes, depths, node_counts, rows);
    for (size_t r = 0; r < rows.size(); ++r)
      TORCH_CHECK_VALUE(kept[r] || rows[r].nodes.empty(), "row ", r, " has a tree, and no token before it is fed");
    level.tap = mlspec::checked_tap(decoder_, rows, tap_layers, tap_states);
    return scored("score_tree", level, tokens, counts, rows, kept, want_confidence, want_logits);
  }

  // score at planes of its own for every block: widths[2 i] for the attention of layer i, widths[2 i + 1] for its MLP.
  std::tuple<Tensor, Tensor, Tensor> score_routed(const Tensor& kv, const Ints& tokens, const Ints& counts, const Ints& starts,
                                                  const Ints& kept, bool want_confidence, bool want_logits,
                                                  int64_t draft_window, const Ints& widths) {
    std::lock_guard<std::mutex> lock(decoder_.busy);
    mlspec::Level level = mlspec::checked_level(decoder_, kv, starts, {}, draft_window);
    mlspec::check_widths(decoder_, widths);
    level.widths = widths;
    return scored("score_routed", level, tokens, counts, starts, kept, want_confidence, want_logits);
  }

  // score, in whose passes `choose` (mlspec::ChooseWidth, an address) picks the planes of each block: for all tokens of one row, counts
  // and kept are 0 of the others, in one pass; or, where it mixes, for each token of all rows. -> what score gives, widths of all
  // blocks, of the last pass' first token
  std::tuple<Tensor, Tensor, Tensor, Ints> score_choosing(const Tensor& kv, const Ints& tokens, const Ints& counts, const Ints& starts,
                                                          const Ints& kept, bool want_confidence, bool want_logits,
                                                          int64_t draft_window, int64_t choose, bool mixes) {
    std::lock_guard<std::mutex> lock(decoder_.busy);
    mlspec::Level level = mlspec::checked_level(decoder_, kv, starts, {}, draft_window);
    const auto fed = std::count_if(counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
    TORCH_CHECK_VALUE(choose && (fed == 1 || mixes), "score_choosing feeds one row, with an address of who picks; got ", fed, " rows");
    mlspec::check_widths(decoder_, Ints(2 * decoder_.layers.size(), 1));
    level.choose = reinterpret_cast<mlspec::ChooseWidth>(choose);
    level.mixes = mixes;
    const auto found = scored("score_choosing", level, tokens, counts, starts, kept, want_confidence, want_logits);
    return std::tuple_cat(found, std::make_tuple(level.widths));
  }

  // -> drafted tokens per row, forward passes, seconds in them
  std::tuple<std::vector<Ints>, int64_t, double> draft(const Tensor& kv, const Ints& tokens, const Ints& counts,
                                                       const Ints& starts, const Ints& limits, double threshold,
                                                       int64_t weight_bits, int64_t activation_bits,
                                                       int64_t draft_window, const std::vector<Tensor>& states,
                                                       const Ints& sources) {
    mlspec::check_threshold("threshold", threshold);
    std::lock_guard<std::mutex> lock(decoder_.busy);
    mlspec::Level level =
        mlspec::checked_level(decoder_, kv, starts, {weight_bits, activation_bits}, draft_window, {states, sources});
    const auto rows = mlspec::split_rows(tokens, counts, starts);
    mlspec::check_room(level, rows, Ints(rows.size(), 1), limits);
    mlspec::check_reached(level, limits);
    auto drafted = in_memory("draft", tokens, counts, [&] {
      return mlspec::draft(at::get_num_threads(), level, rows, limits, threshold);
    });
    return {std::move(drafted), level.forwards, level.seconds};
  }

  // -> settled tokens per row; (drafted, accepted) per row and round, flat; lengths of the middle, of the tiny level;
  //    rounds, forwards of both; seconds of both. tiny may be this very decoder, in other rows' cache or in the same one.
  std::tuple<std::vector<Ints>, Ints, Ints, Ints, Ints, std::vector<double>> draft_checked(
      const Tensor& kv, const Ints& lengths, const c10::intrusive_ptr<DecoderObject>& tiny, const Tensor& tiny_kv,
      const Ints& tiny_lengths, const Ints& tokens, const Ints& counts, const Ints& bases, const Ints& limits,
      int64_t num_draft_tokens, double tiny_threshold, double middle_threshold, int64_t weight_bits,
      int64_t activation_bits, int64_t draft_window, int64_t tiny_weight_bits, int64_t tiny_activation_bits,
      int64_t tiny_draft_window, const std::vector<Tensor>& states, const Ints& sources, const std::vector<Tensor>& tiny_states,
      const Ints& tiny_sources) {
    TORCH_CHECK_VALUE(num_draft_tokens >= 0, "num_draft_tokens is ", num_draft_tokens);
    mlspec::check_threshold("tiny_threshold", tiny_threshold);
    mlspec::check_threshold("middle_threshold", middle_threshold);
    std::unique_lock own(decoder_.busy, std::defer_lock), other(tiny->decoder_.busy, std::defer_lock);
    tiny.get() == this ? own.lock() : std::lock(own, other);
    mlspec::Level middle =
        mlspec::checked_level(decoder_, kv, lengths, {weight_bits, activation_bits}, draft_window, {states, sources});
    mlspec::Level small = mlspec::checked_level(tiny->decoder_, tiny_kv, tiny_lengths, {tiny_weight_bits, tiny_activation_bits},
                                                tiny_draft_window, {tiny_states, tiny_sources});
    const auto rows = mlspec::split_rows(tokens, counts, bases);
    mlspec::check_room(middle, rows, Ints(rows.size(), 1), limits);
    mlspec::check_room(small, rows, Ints(rows.size(), 1), limits);
    mlspec::check_reached(middle, limits);
    if (!mlspec::follows(small, middle)) mlspec::check_reached(small, limits);
    mlspec::CheckedOptions options{num_draft_tokens, static_cast<float>(tiny_threshold), static_cast<float>(middle_threshold)};
    auto out = in_memory("draft_checked", tokens, counts, [&] {
      return mlspec::draft_checked(at::get_num_threads(), middle, small, rows, limits, options);
    });
    Ints inner;
    for (const auto& [drafted, accepted] : out.inner) inner.insert(inner.end(), {drafted, accepted});
    return {std::move(out.settled), std::move(inner), middle.lengths, small.lengths,
            Ints{out.rounds, middle.forwards, small.forwards}, std::vector<double>{middle.seconds, small.seconds}};
  }

 private:
  // What `score` gives, of a level that is checked but for its rows.
  std::tuple<Tensor, Tensor, Tensor> scored(const char* call, mlspec::Level& level, const Ints& tokens, const Ints& counts,
                                            const Ints& starts, const Ints& kept, bool want_confidence, bool want_logits) {
    const auto rows = mlspec::split_rows(tokens, counts, starts);
    mlspec::check_room(level, rows, kept, Ints(rows.size(), 0));
    for (size_t r = 0; r < kept.size(); ++r)
      TORCH_CHECK_VALUE(kept[r] >= 0 && kept[r] <= counts[r], "row ", r, " keeps ", kept[r], " of ", counts[r], " tokens");
    mlspec::check_reached(level, kept);
    return scored(call, level, tokens, counts, rows, kept, want_confidence, want_logits);
  }

  // The same of rows that are checked, too.
  std::tuple<Tensor, Tensor, Tensor> scored(const char* call, mlspec::Level& level, const Ints& tokens, const Ints& counts,
                                            const std::vector<mlspec::TokenRow>& rows, const Ints& kept, bool want_confidence,
                                            bool want_logits) {
    int64_t total = 0;
    for (size_t r = 0; r < kept.size(); ++r) total += kept[r] + rows[r].nodes.size();
    Tensor logits = at::empty({want_logits ? total : 0, decoder_.shape.vocab}, at::kFloat);
    float* const to = want_logits ? logits.mutable_data_ptr<float>() : nullptr;
    const mlspec::Scored scored = in_memory(call, tokens, counts, [&] {
      return mlspec::score(at::get_num_threads(), level, rows, kept, want_confidence, to);
    });
    return {as_tensor(scored.best, at::kLong), as_tensor(scored.confidence, at::kFloat), logits};
  }

  const void* hold(const Tensor& tensor) {
    held_.push_back(tensor);
    return tensor.const_data_ptr();
  }

  void hold_parts(const mlspec::NestedTensors& parts) {
    for (const Tensor* part : {&parts.draft, &parts.exponents, &parts.low}) hold(*part);
    hold_some(parts.escape_rows, parts.escape_weight);
  }

  void hold_some(const MaybeTensor& one, const MaybeTensor& other) {
    if (one) hold(*one);
    if (other) hold(*other);
  }

  // A checked linear with its bias to the place that `name` means.
  void put(const std::string& name, mlspec::Linear linear, const MaybeTensor& bias) {
    mlspec::Linear& target = place(name);
    if (name.rfind("delta_", 0) == 0) {
      mlspec::check_delta_place(name, decoder_.delta, decoder_.shape.hidden, linear.in_features, linear.out_features);
    } else {
      mlspec::check_place(name, shape_at(name), linear.in_features, linear.out_features, decoder_.ranks.count);
    }
    linear.bias = floats(bias, name + ".bias", linear.out_features);
    linear.block = mlspec::block_of(name, decoder_.layers.size());
    target = linear;
  }

  // The decoder's, or, of a linear of the newest layer, with that one's sizes; intermediate: also of what is multiplied by its inputs.
  mlspec::DecoderShape shape_at(const std::string& name) const {
    mlspec::DecoderShape s = decoder_.shape;
    if (name == "head" || decoder_.layers.empty()) return s;
    const DecoderLayer& layer = decoder_.layers.back();
    s.kv_heads = layer.kv_heads, s.head_dim = layer.head_dim, s.intermediate = layer.intermediate;
    if (name == "token_inputs") s.intermediate = decoder_.token_inputs.projection.out_features;
    if (name == "inputs_gate" || name == "inputs_out") s.intermediate = decoder_.token_inputs.width;
    return s;
  }

  const float* floats(const MaybeTensor& weight, const std::string& what, int64_t size) {
    if (!weight) return nullptr;
    check_plain(*weight, what, at::kFloat, {size});
    return static_cast<const float*>(hold(*weight));
  }

  DecoderLayer& newest(const std::string& name) {
    TORCH_CHECK_VALUE(!decoder_.layers.empty(), "a layer has no linear ", name, ": add a layer first");
    return decoder_.layers.back();
  }

  mlspec::Experts& newest_experts(const std::string& name) {
    TORCH_CHECK_VALUE(newest(name).experts, name, ": a layer without a router has no experts");
    return *newest(name).experts;
  }

  mlspec::Linear& place(const std::string& name) {
    if (name == "head") return decoder_.head;
    if (name == "token_inputs") {
      TORCH_CHECK_VALUE(decoder_.token_inputs, "token_inputs: set_token_inputs comes first");
      return decoder_.token_inputs.projection;
    }
    if (name == "inputs_gate" || name == "inputs_out") {
      TORCH_CHECK_VALUE(newest(name).inputs, "a layer has no linear ", name, ": set_inputs comes first");
      return name == "inputs_gate" ? decoder_.layers.back().inputs->gate : decoder_.layers.back().inputs->projection;
    }
    if (name.rfind("shared_", 0) == 0) return mlspec::shared_linear(newest_experts(name), name);
    if (name.rfind("delta_", 0) == 0) {
      static const std::map<std::string, mlspec::Linear mlspec::DeltaNet::*> of_nets = {{"delta_qkv", &mlspec::DeltaNet::qkv},
                                                                                       {"delta_z", &mlspec::DeltaNet::z},
                                                                                       {"delta_b", &mlspec::DeltaNet::b},
                                                                                       {"delta_a", &mlspec::DeltaNet::a},
                                                                                       {"delta_out", &mlspec::DeltaNet::out}};
      const auto found = of_nets.find(name);
      TORCH_CHECK_VALUE(newest(name).delta && found != of_nets.end(), "a layer has no linear ", name);
      return (*newest(name).delta).*(found->second);
    }
    static const std::map<std::string, mlspec::Linear DecoderLayer::*> places = {
        {"q", &DecoderLayer::q},       {"k", &DecoderLayer::k},   {"v", &DecoderLayer::v},      {"o", &DecoderLayer::o},
        {"gate", &DecoderLayer::gate}, {"up", &DecoderLayer::up}, {"down", &DecoderLayer::down}};
    const auto found = places.find(name);
    TORCH_CHECK_VALUE(found != places.end(), "a layer has no linear ", name);
    return newest(name).*(found->second);
  }

  mlspec::Decoder decoder_;
  std::array<int64_t, 3> own_{};  // set_layer_sizes, 0: the decoder's
  std::vector<Tensor> held_;
  std::vector<std::pair<Tensor, Tensor>> rope_tensors_;
  int64_t num_position_rows_ = 0;  // 0: positions have no embedding
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mlspec, m) {
  m.class_<DecoderObject>("Decoder")
      .def(torch::init<Ints, std::vector<double>, Tensor, Tensor, MaybeTensor>())
      .def("set_rope", &DecoderObject::set_rope)
      .def("set_position_embedding", &DecoderObject::set_position_embedding)
      .def("set_layer_sizes", &DecoderObject::set_layer_sizes)
      .def("add_layer", &DecoderObject::add_layer)
      .def("reuse_keys", &DecoderObject::reuse_keys)
      .def("set_values", &DecoderObject::set_values)
      .def("set_view", &DecoderObject::set_view)
      .def("set_scale", &DecoderObject::set_scale)
      .def("set_token_inputs", &DecoderObject::set_token_inputs)
      .def("set_inputs", &DecoderObject::set_inputs)
      .def("weigh_inputs", &DecoderObject::weigh_inputs)
      .def("set_delta_shape", &DecoderObject::set_delta_shape)
      .def("set_delta", &DecoderObject::set_delta)
      .def("reach", &DecoderObject::reach)
      .def("set_router", &DecoderObject::set_router)
      .def("set_sigmoids", &DecoderObject::set_sigmoids)
      .def("set_pairs", &DecoderObject::set_pairs)
      .def("set_experts", &DecoderObject::set_experts)
      .def("set_nested_experts", &DecoderObject::set_nested_experts)
      .def("set_plane_experts", &DecoderObject::set_plane_experts)
      .def("set_linear", &DecoderObject::set_linear)
      .def("set_nested", &DecoderObject::set_nested)
      .def("set_planes", &DecoderObject::set_planes)
      .def("set_lut", &DecoderObject::set_lut)
      .def("set_zipper", &DecoderObject::set_zipper)
      .def("set_outliers", &DecoderObject::set_outliers)
      .def("set_plane_reader", &DecoderObject::set_plane_reader)
      .def("set_ranks", &DecoderObject::set_ranks)
      .def("set_streamed", &DecoderObject::set_streamed)
      .def("set_order", &DecoderObject::set_order)
      .def("set_activation_clip", &DecoderObject::set_activation_clip)
      .def("set_hadamard", &DecoderObject::set_hadamard)
      .def("set_adapter", &DecoderObject::set_adapter)
      .def("set_nested_embedding", &DecoderObject::set_nested_embedding)
      .def("set_zipper_embedding", &DecoderObject::set_zipper_embedding)
      .def("set_dequantize", &DecoderObject::set_dequantize)
      .def("score", &DecoderObject::score)
      .def("score_tapped", &DecoderObject::score_tapped)
      .def("score_tree", &DecoderObject::score_tree)
      .def("score_tree_tapped", &DecoderObject::score_tree_tapped)
      .def("score_routed", &DecoderObject::score_routed)
      .def("score_choosing", &DecoderObject::score_choosing)
      .def("draft", &DecoderObject::draft)
      .def("draft_checked", &DecoderObject::draft_checked);
}
