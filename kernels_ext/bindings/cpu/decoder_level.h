// What may a call of the compiled decoder ask of it? All linears there and able to, and a cache of the model's shape.
#pragma once
#include <vector>

#include "../operands.h"
#include "decoder_delta.h"
#include "decoder_experts.h"
#include "decoder_precisions.h"

namespace mlspec {

// Linears that read the same packed activations must want them in one form, and every linear must be there.
inline void check_complete(const Decoder& decoder, Bits bits) {
  const auto alike = [&](const Linear& a, const Linear& b) {
    return a.format == b.format && a.group == b.group && a.at(bits) == b.at(bits) && a.order == b.order &&
           a.outliers == b.outliers && a.activation_clip == b.activation_clip;
  };
  const auto ready = [](const Linear& linear) { return linear.weight && (linear.order || !linear.outliers); };
  TORCH_CHECK_VALUE(decoder.embedding || decoder.nested_embedding.weight || decoder.zipper_embedding.planes,
                    "the decoder has no embedding yet: its table has 0 rows, and set_nested_embedding was not called");
  TORCH_CHECK_VALUE(ready(decoder.head), "the decoder has no head yet");
  const TokenInputs& inputs = decoder.token_inputs;
  TORCH_CHECK_VALUE(!inputs || (ready(inputs.projection) && inputs.projection.out_features ==
                                static_cast<int64_t>(decoder.layers.size()) * inputs.width),
                    "the inputs of layers are those of ", inputs ? inputs.projection.out_features / inputs.width : 0, " layers, of ",
                    decoder.layers.size(), ", or have no linear yet");
  for (size_t i = 0; i < decoder.layers.size(); ++i) {
    const DecoderLayer& l = decoder.layers[i];
    if (l.delta) check_delta(*l.delta, decoder.delta, alike, ready, "layer " + std::to_string(i) + " of the decoder");
    for (const Linear* linear : {&l.q, &l.k, &l.v, &l.o}) {
      if (l.delta) continue;
      const bool inside = ((decoder.shape.grouped_qkv || l.reuses_keys) && (linear == &l.k || linear == &l.v)) ||
                          (l.values_are_keys && linear == &l.v);
      TORCH_CHECK_VALUE(inside || ready(*linear), "layer ", i, " of the decoder has not all of its linears yet");
    }
    for (const Linear* linear : {&l.gate, &l.up, &l.down}) {
      const bool none = l.experts || decoder.shape.no_mlp || (decoder.shape.plain_mlp && linear == &l.gate);
      TORCH_CHECK_VALUE(none || ready(*linear), "layer ", i, " of the decoder has not all of its linears yet");
    }
    TORCH_CHECK_VALUE(!l.experts || !decoder.shape.parallel, "layer ", i, ": experts do not run beside attention");
    if (l.experts) check_experts(*l.experts, bits, "layer " + std::to_string(i) + " of the decoder");
    const bool parts = decoder.shape.grouped_qkv || l.reuses_keys || (alike(l.q, l.k) && (l.values_are_keys || alike(l.q, l.v)));
    TORCH_CHECK_VALUE(!l.inputs || (ready(l.inputs->gate) && ready(l.inputs->projection)), "layer ", i, " of the decoder has not all of its "
                      "linears yet");
    TORCH_CHECK_VALUE(parts && (decoder.shape.plain_mlp || alike(l.gate, l.up)), "layer ", i,
                      ": q, k, v and gate, up need weights of one format, group, numbers of bits, clip of activations, and order of inputs");
  }
}

// What a call asks of all packed weights, all of them must be able to.
inline void check_able(const Decoder& decoder, Bits bits) {
  bool packed = decoder.head.is_packed();
  check_bits(decoder.head, bits, "");
  if (decoder.token_inputs) packed |= decoder.token_inputs.projection.is_packed(), check_bits(decoder.token_inputs.projection, bits, "");
  for (const DecoderLayer& l : decoder.layers) {
    l.each_linear([&](const Linear& linear) {
      packed |= linear.is_packed();
      check_bits(linear, bits, "");
    });
    if (!l.experts) continue;
    each_expert_linear(*l.experts, [&](const Linear& linear) {
      packed |= linear.is_packed();
      check_bits(linear, bits, "");
    });
  }
  TORCH_CHECK_VALUE(bits == Bits{} || packed, "weight_bits is ", bits.weight, " and activation_bits is ", bits.activation,
                    ", and the decoder holds no packed weights; pass 0 and 0");
}

// The block of a linear of the newest of so many layers, as in Linear::block.
inline int64_t block_of(const std::string& name, int64_t layers) {
  const int64_t first = 2 * (layers - 1);
  for (const char* const one : {"q", "k", "v", "o"})
    if (name == one) return first;
  for (const char* const one : {"gate", "up", "down"})
    if (name == one) return first + 1;
  return -1;
}

// Planes of every block of all layers.
inline void check_widths(const Decoder& decoder, const std::vector<int64_t>& widths) {
  const size_t blocks = 2 * decoder.layers.size();
  TORCH_CHECK_VALUE(widths.size() == blocks, "there are widths of ", widths.size(), " blocks, the decoder has ", blocks);
  for (const DecoderLayer& l : decoder.layers) {
    TORCH_CHECK_VALUE(!l.delta && !l.experts && !l.inputs, "layers with delta nets, experts or inputs have no widths of their own");
    l.each_linear([&](const Linear& linear) {
      if (!linear.weight) return;
      TORCH_CHECK_VALUE(linear.format == WeightFormat::kPlanes, "only bit-planes have a width for every block");
      check_bits(linear, {widths[linear.block], 0}, "block " + std::to_string(linear.block) + ": ");
    });
  }
}

// A level of a call: a complete decoder over a cache of its shape. kv: [layers that have some, 2, batch, kv_heads, slots, head_dim] of what the
// model writes, or rows of codes [.., mlspec_cache_row_bytes].
inline Level checked_level(Decoder& decoder, const at::Tensor& kv, const std::vector<int64_t>& lengths, Bits bits,
                           int64_t draft_window, const RecurrentLevel& recurrent = {}) {
  TORCH_CHECK_VALUE(draft_window >= 0, "draft_window is ", draft_window, ", 0 (none) or a number of slots is meant");
  check_complete(decoder, bits);
  check_able(decoder, bits);
  const DecoderShape& s = decoder.shape;
  const int64_t layers = decoder.num_kv_layers();
  const std::optional<mlspec_dtype> codes = rows_of_codes(kv.scalar_type());
  const mlspec_dtype dtype = codes ? *codes : storage_dtype(kv, "the cache");
  TORCH_CHECK_VALUE(dtype != MLSPEC_INT4_ROWS || s.head_dim % 2 == 0, "the cache is ", kv.scalar_type(),
                    ", two codes a byte, and heads have ", s.head_dim, " elements");
  const int64_t width = mlspec_cache_row_bytes(dtype, s.head_dim) / mlspec_element_bytes(dtype);
  const auto fits = [&](int64_t has, int64_t own) { return decoder.layers_differ ? has >= own : has == own; };
  TORCH_CHECK_VALUE(kv.dim() == 6 && kv.size(0) >= layers && kv.size(1) == 2 && fits(kv.size(3), s.kv_heads) &&
                        fits(kv.size(5), width) && kv.is_contiguous() && kv.is_cpu(),
                    "the cache has shape ", kv.sizes(), ", expected contiguous [", layers, ", 2, batch, ", s.kv_heads,
                    ", slots, ", width, "] on the CPU");
  TORCH_CHECK_TYPE(dtype == s.kv_dtype || codes, "the cache is ", kv.scalar_type(),
                   ", which is not what the model writes");
  const int64_t row_bytes = kv.size(5) * mlspec_element_bytes(dtype);
  Level level{&decoder, {kv.mutable_data_ptr(), kv.size(0), kv.size(2), kv.size(4), dtype, kv.size(3), row_bytes}, lengths, bits, draft_window};
  put_states(level, recurrent);
  return level;
}

}  // namespace mlspec
