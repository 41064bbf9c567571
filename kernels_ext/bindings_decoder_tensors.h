// Which tensors may a compiled decoder hold? Format, sizes and memory; every message names the tensor and the numbers.
#pragma once
#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <string>

#include "cpu/decoder_rounds.h"
#include "formats.h"

namespace mlspec {

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
inline void check_place(const std::string& name, const DecoderShape& s, int64_t in, int64_t out) {
  const int64_t queries = s.heads * s.head_dim, keys = s.kv_heads * s.head_dim;
  const bool from_hidden = name != "o" && name != "down";
  const int64_t inputs = from_hidden ? s.hidden : name == "o" ? queries : s.intermediate;
  const int64_t outputs = !from_hidden    ? s.hidden
                          : name == "head" ? s.vocab
                          : name == "q"    ? queries
                          : name == "k" || name == "v" ? keys
                                                       : s.intermediate;
  TORCH_CHECK_VALUE(in == inputs && out == outputs, name, " maps ", in, " to ", out, " features, the decoder's maps ", inputs,
                    " to ", outputs);
}

inline void check_weight(const std::string& name, const Linear& linear, const at::Tensor& weight,
                         const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& zero) {
  const int64_t in = linear.in_features, out = linear.out_features, group = linear.group, bits = linear.activation_bits;
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
      TORCH_CHECK_VALUE((group == 32 || group == 64 || group == 128) && in % group == 0 && scale, what,
                        ": int4 takes scales of groups of 32, 64 or 128 that divide ", in, ", not of ", group);
      TORCH_CHECK_VALUE(bits == 4 || bits == 8 || bits == 16, what, ": activation_bits is ", bits, ", choose 4, 8 or 16");
      check_plain(*scale, name + ".scale", at::kHalf, {tiles, in / group, kTileOutputs});
      if (zero) check_plain(*zero, name + ".zero", at::kByte, {tiles, in / group, kTileOutputs});
      break;
    default: TORCH_CHECK_VALUE(false, what, ": unknown format ", static_cast<int64_t>(linear.format));
  }
  check_plain(weight, what, at::kByte, {tiles, blocks, kTileBytes});
}

// Linears that read the same packed activations must want them in one form, and every linear must be there. bits: of this
// call's activations, 0: each linear's own.
inline void check_complete(const Decoder& decoder, int64_t bits) {
  const auto alike = [&](const Linear& a, const Linear& b) {
    return a.format == b.format && a.group == b.group && a.bits_at(bits) == b.bits_at(bits);
  };
  TORCH_CHECK_VALUE(decoder.head.weight, "the decoder has no head yet");
  for (size_t i = 0; i < decoder.layers.size(); ++i) {
    const DecoderLayer& l = decoder.layers[i];
    for (const Linear* linear : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down})
      TORCH_CHECK_VALUE(linear->weight, "layer ", i, " of the decoder has not all of its seven linears yet");
    TORCH_CHECK_VALUE(alike(l.q, l.k) && alike(l.q, l.v) && alike(l.gate, l.up), "layer ", i,
                      ": q, k, v and gate, up need weights of one format, group and activation width");
  }
}

// What a call asks of all 4-bit weights, all of them must be able to.
inline void check_width(const Decoder& decoder, int64_t bits) {
  bool mxfp4 = decoder.head.format == WeightFormat::kMxfp4, packed = decoder.head.is_packed();
  for (const DecoderLayer& l : decoder.layers) {
    for (const Linear* linear : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) {
      mxfp4 |= linear->format == WeightFormat::kMxfp4;
      packed |= linear->is_packed();
    }
  }
  TORCH_CHECK_VALUE(bits == 0 || packed, "activation_bits is ", bits, ", and the decoder holds no 4-bit weights; pass 0");
  TORCH_CHECK_VALUE(bits == 0 || bits == 16 || bits == 8 || (bits == 4 && !mxfp4), "activation_bits is ", bits, ", choose ",
                    mxfp4 ? "16 or 8 for MXFP4 weights" : "16, 8 or 4 for int4 weights", ", or 0 for each layer's own");
}

// With NaN the rounds would neither ask for confidences nor do without them.
inline void check_threshold(const char* name, double threshold) {
  TORCH_CHECK_VALUE(!std::isnan(threshold), name, " is NaN, expected a probability, or 0 for none");
}

// A level of a call: a complete decoder over a cache of its shape. kv: [layers, 2, batch, kv_heads, slots, head_dim].
inline Level checked_level(Decoder& decoder, const at::Tensor& kv, const std::vector<int64_t>& lengths, int64_t bits) {
  check_complete(decoder, bits);
  check_width(decoder, bits);
  const DecoderShape& s = decoder.shape;
  const int64_t layers = decoder.layers.size();
  TORCH_CHECK_VALUE(kv.dim() == 6 && kv.size(0) >= layers && kv.size(1) == 2 && kv.size(3) == s.kv_heads &&
                        kv.size(5) == s.head_dim && kv.is_contiguous() && kv.is_cpu(),
                    "the cache has shape ", kv.sizes(), ", expected contiguous [", layers, ", 2, batch, ", s.kv_heads,
                    ", slots, ", s.head_dim, "] on the CPU");
  TORCH_CHECK_TYPE(storage_dtype(kv, "the cache") == s.kv_dtype, "the cache is ", kv.scalar_type(),
                   ", which is not what the model writes");
  return {&decoder, {kv.mutable_data_ptr(), kv.size(0), kv.size(2), kv.size(4)}, lengths, bits};
}

}  // namespace mlspec
