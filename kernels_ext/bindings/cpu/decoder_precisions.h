// Which weights of many precisions may a compiled decoder hold, and what may a call ask of a linear? Nested BF16, bit-planes,
// those with tables, and weights in two parts.
#pragma once
#include <string>

#include "decoder_tensors.h"
#include "../zipper_places.h"
#include "planes.h"

namespace mlspec {

// A nested weight as the kernels read it (ops/nested/tiles.py), with the whole rows of outputs that have escapes.
struct NestedTensors {
  const at::Tensor &draft, &exponents, &low;
  const std::optional<at::Tensor>&escape_rows, &escape_weight;
};

inline EscapedRows escaped_rows(const std::string& name, const NestedTensors& parts, int64_t in, int64_t out) {
  TORCH_CHECK_VALUE(parts.escape_rows.has_value() == parts.escape_weight.has_value(), name,
                    ": escape_rows and escape_weight come together, or neither");
  if (!parts.escape_rows) return {};
  const int64_t count = parts.escape_rows->numel();
  check_plain(*parts.escape_rows, name + ".escape_rows", at::kLong, {count});
  check_plain(*parts.escape_weight, name + ".escape_weight", at::kBFloat16, {count, in});
  const int64_t* const rows = parts.escape_rows->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_VALUE(rows[i] < out && rows[i] >= (i ? rows[i - 1] + 1 : 0), name, ".escape_rows[", i, "] is ", rows[i],
                      ", expected ascending rows of ", out);
  return {rows, static_cast<const uint16_t*>(parts.escape_weight->const_data_ptr()), count};
}

// Everything but its codebook and bias.
inline Linear nested_table(const std::string& name, const NestedTensors& parts, int64_t in, int64_t out) {
  TORCH_CHECK_VALUE(in % kBlock == 0, name, ": a nested weight takes in_features a multiple of ", kBlock, ", not ", in);
  const int64_t tiles = (out + kTileOutputs - 1) / kTileOutputs, steps = in / kBlock;
  check_plain(parts.draft, name + ".draft_tiles", at::kByte, {tiles, steps, kTileBytes});
  check_plain(parts.exponents, name + ".exponent_tiles", at::kByte, {tiles, steps, kTileOutputs});
  check_plain(parts.low, name + ".low_tiles", at::kByte, {tiles, steps, kLowTileBytes});
  Linear linear;
  linear.format = WeightFormat::kNested;
  linear.weight = parts.draft.const_data_ptr();
  linear.scale = parts.exponents.const_data_ptr();
  linear.low = parts.low.const_data_ptr<uint8_t>();
  linear.in_features = in, linear.out_features = out;
  linear.escaped = escaped_rows(name, parts, in, out);
  return linear;
}

// plane_tiles [stored planes, tiles, in / 32, 64], as ops/planes/tiles.py has them; the tiles of a part of the outputs (Phi-3)
// have the planes of all of them in between.
inline Linear planes_linear(const std::string& name, const at::Tensor& planes, const at::Tensor& scale, int64_t in, int64_t out,
                            int64_t group, int64_t zero_doubled) {
  TORCH_CHECK_VALUE(is_group_size(group) && in % group == 0, name,
                    ": bit-planes take scales of groups of 32, 64 or 128 that divide ", in, ", not of ", group);
  const int64_t tiles = (out + kTileOutputs - 1) / kTileOutputs, stored = planes.dim() == 4 ? planes.size(0) : 0;
  TORCH_CHECK_VALUE(stored >= 1 && stored <= kMaxPlanes, name, ".plane_tiles has shape ", planes.sizes(), ", expected [1 to ",
                    kMaxPlanes, ", ", tiles, ", ", in / kBlock, ", ", kPlaneBytes, "]");
  check_zero_doubled(name, zero_doubled, stored);
  check_plain(planes.select(0, 0), name + ".plane_tiles[0]", at::kByte, {tiles, in / kBlock, kPlaneBytes});
  TORCH_CHECK_VALUE(stored == 1 || planes.stride(0) >= planes.numel() / stored, name, ".plane_tiles: one plane of ",
                    planes.numel() / stored, " bytes begins ", planes.stride(0), " behind the one before it");
  check_plain(scale, name + ".scale_tiles", at::kHalf, {tiles, in / group, kTileOutputs});
  Linear linear;
  linear.format = WeightFormat::kPlanes;
  linear.weight = planes.const_data_ptr();
  linear.scale = scale.const_data_ptr();
  linear.group = group;
  linear.in_features = in, linear.out_features = out;
  linear.stored_planes = stored, linear.plane_bytes = planes.stride(0), linear.zero_doubled = zero_doubled;
  return linear;
}

// plane_tiles as of bit-planes; table_tiles [tiles, 16, the tables of an output], as ops/lut/tiles.py has them.
inline Linear lut_linear(const std::string& name, const at::Tensor& planes, const at::Tensor& tables, int64_t in, int64_t out) {
  TORCH_CHECK_VALUE(in % kBlock == 0, name, ": lookup-table planes take in_features a multiple of ", kBlock, ", not ", in);
  const int64_t tiles = (out + kTileOutputs - 1) / kTileOutputs, stored = planes.dim() == 4 ? planes.size(0) : 0;
  const int64_t columns = tables.dim() == 3 ? tables.size(2) : 0;
  TORCH_CHECK_VALUE(stored >= 1 && stored <= kMaxPlanes && least_planes_of(stored, columns), name, ".plane_tiles has shape ",
                    planes.sizes(), " and table_tiles ", tables.sizes(), ", expected [B, ", tiles, ", ", in / kBlock, ", ",
                    kPlaneBytes, "] with B from 1 to ", kMaxPlanes, " and [", tiles, ", 16, 2^(B+1) - 2^S]");
  check_plain(planes.select(0, 0), name + ".plane_tiles[0]", at::kByte, {tiles, in / kBlock, kPlaneBytes});
  TORCH_CHECK_VALUE(stored == 1 || planes.stride(0) >= planes.numel() / stored, name, ".plane_tiles: one plane of ",
                    planes.numel() / stored, " bytes begins ", planes.stride(0), " behind the one before it");
  check_plain(tables, name + ".table_tiles", at::kHalf, {tiles, kTileOutputs, columns});
  Linear linear;
  linear.format = WeightFormat::kLut;
  linear.weight = planes.const_data_ptr();
  linear.scale = tables.const_data_ptr();
  linear.in_features = in, linear.out_features = out;
  linear.stored_planes = stored, linear.plane_bytes = planes.stride(0), linear.table_columns = columns;
  return linear;
}

// The low part, planes or the tiles of int4, with the row's scale in every group; high int32 as ops/zipper.py has it.
// The words are trusted: prepack_zipper made them.
inline Linear zipper_linear(const std::string& name, const at::Tensor& low, const at::Tensor& scale, const at::Tensor& high,
                            int64_t in, int64_t out, int64_t group) {
  Linear linear;
  if (low.dim() == 4) {
    TORCH_CHECK_VALUE(low.size(0) <= kIntegerPlanes, name, ".plane_tiles has shape ", low.sizes(), ", a low part has 1 to ",
                      kIntegerPlanes, " planes");
    linear = planes_linear(name, low, scale, in, out, group, int64_t(1) << low.size(0));
  } else {
    linear.format = WeightFormat::kInt4;
    linear.in_features = in, linear.out_features = out, linear.group = group;
    check_weight(name, linear, low, scale, std::nullopt);
    linear.weight = low.const_data_ptr(), linear.scale = scale.const_data_ptr();
  }
  check_plain(high, name + ".high", at::kInt, {high.size(0)});
  linear.format = WeightFormat::kZipper;
  const ZipperPlaces places(in, out);
  TORCH_CHECK_VALUE(high.dim() == 1 && high.size(0) >= places.words, name, ".high has shape ", high.sizes(), ", expected [",
                    places.words, " + words]");
  const int32_t* const numbers = high.const_data_ptr<int32_t>();
  linear.high = {reinterpret_cast<const float*>(numbers + places.step), numbers + places.starts,
                 reinterpret_cast<const int16_t*>(numbers + places.words)};
  const int64_t slots = (high.size(0) - places.words) * 2 / MLSPEC_ZIPPER_OUTPUTS;
  TORCH_CHECK_VALUE(linear.high.starts[0] == 0 && linear.high.starts[places.cells] == slots, name, ".high has ", slots,
                    " slots, its cells end at ", linear.high.starts[places.cells]);
  return linear;
}

// What a call asks of a linear, 0: what it is set to; `what` names the linear in the message.
inline void check_bits(const Linear& linear, Bits asked, const std::string& what) {
  const Bits bits = linear.at(asked);
  switch (linear.format) {
    case WeightFormat::kBf16:
    case WeightFormat::kF32: return;
    case WeightFormat::kMxfp4:
    case WeightFormat::kInt4: {
      const bool mxfp4 = linear.format == WeightFormat::kMxfp4;
      TORCH_CHECK_VALUE(bits.weight == 4, what, "weight_bits is ", bits.weight, ", choose 4 for ", mxfp4 ? "MXFP4" : "int4",
                        " weights, or 0 for each layer's own");
      TORCH_CHECK_VALUE(bits.activation == 16 || bits.activation == 8 || (bits.activation == 4 && !mxfp4), what,
                        "activation_bits is ", bits.activation, ", choose ",
                        mxfp4 ? "16 or 8 for MXFP4 weights" : "16, 8 or 4 for int4 weights", ", or 0 for each layer's own");
      return;
    }
    case WeightFormat::kNested:
      TORCH_CHECK_VALUE((bits.activation == 16 && (bits.weight == 16 || bits.weight == 4)) || bits == Bits({4, 8}), what,
                        "weight_bits is ", bits.weight, " and activation_bits ", bits.activation,
                        ", choose 16 and 16, 4 and 16 or 4 and 8 for nested weights, or 0 for each layer's own");
      return;
    case WeightFormat::kPlanes:
      TORCH_CHECK_VALUE(bits.weight >= 1 && bits.weight <= linear.stored_planes, what, "weight_bits is ", bits.weight,
                        ", the weight stores ", linear.stored_planes, " bit-planes: choose 1 to ", linear.stored_planes,
                        ", or 0 for each layer's own");
      TORCH_CHECK_VALUE(bits.activation == 16, what, "activation_bits is ", bits.activation,
                        ", choose 16 for bit-planes, or 0 for each layer's own");
      return;
    case WeightFormat::kZipper:
      TORCH_CHECK_VALUE((bits.weight == kZipperWhole || bits.weight == kZipperLow) &&
                            (bits.activation == 16 || bits.activation == 8 || bits.activation == 4),
                        what, "weight_bits is ", bits.weight, " and activation_bits ", bits.activation, ", choose ", kZipperWhole,
                        " (both parts) or ", kZipperLow, " (the low one) and 16, 8 or 4 for zipper weights, or 0 for each layer's "
                        "own");
      return;
    case WeightFormat::kLut: {
      const int64_t least = least_planes_of(linear.stored_planes, linear.table_columns);
      TORCH_CHECK_VALUE(bits.weight >= least && bits.weight <= linear.stored_planes, what, "weight_bits is ", bits.weight,
                        ", the weight has tables of ", least, " to ", linear.stored_planes,
                        " bits: choose one of these, or 0 for each layer's own");
      TORCH_CHECK_VALUE(bits.activation == 16, what, "activation_bits is ", bits.activation,
                        ", choose 16 for lookup-table planes, or 0 for each layer's own");
    }
  }
}

}  // namespace mlspec
