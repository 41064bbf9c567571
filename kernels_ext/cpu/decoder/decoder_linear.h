// What is a linear layer of the decoder, and which of its bits does a call read?
#pragma once
#include <cstdint>

#include "../kernels.h"

namespace mlspec {

enum class WeightFormat : int64_t { kBf16 = 0, kF32 = 1, kMxfp4 = 2, kInt4 = 3, kNested = 4, kPlanes = 5, kLut = 6, kZipper = 7 };

// Weight bits that stand for both parts of a weight in two, whatever it has; fewer for its low part alone.
constexpr int64_t kZipperWhole = 6, kZipperLow = 4;

// Of weights and activations. 0 in what a call asks for: each layer's own.
struct Bits {
  int64_t weight = 0, activation = 0;
  bool operator==(const Bits&) const = default;
};

// Rows of a nested weight that its fields do not hold (formats/nested/fields.py): whole, in bfloat16.
struct EscapedRows {
  const int64_t* rows = nullptr;      // [count], ascending
  const uint16_t* weight = nullptr;  // [count][in]
  int64_t count = 0;
};

// The sparse high part of a weight in two: mlspec_zipper_args in kernels.h.
struct HighCells {
  const float* step = nullptr;
  const int32_t* starts = nullptr;
  const int16_t* words = nullptr;
};

// What an adapter adds to a linear: up (down x), in float32 (LoRA, arXiv 2106.09685).
struct LowRank {
  const float* down = nullptr;  // [rank][in]; null: no adapter
  const float* up = nullptr;    // [out][rank], times the adapter's scale
  int64_t rank = 0;
  explicit operator bool() const { return down; }
};

// A linear layer where its weights lie; nothing is copied. Layouts: mlspec_linear_args in kernels.h.
struct Linear {
  WeightFormat format = WeightFormat::kBf16;
  const void* weight = nullptr;
  const void* scale = nullptr;
  const uint8_t* zero = nullptr;
  const float* bias = nullptr;
  int64_t group = 0;     // of the formats with groups
  Bits own = {16, 16};   // what it reads where a call does not say
  int64_t in_features = 0, out_features = 0;
  const uint8_t* low = nullptr;       // nested
  const uint8_t* codebook = nullptr;
  EscapedRows escaped;
  int64_t stored_planes = 0, plane_bytes = 0, zero_doubled = 0;  // bit-planes, of which those with tables have no zero
  // Bit-planes that are streamed: so many are always where `weight` says, the others while Decoder::planes holds them there for
  // `key`. 0: all are there.
  int64_t resident_planes = 0, key = 0;
  int64_t table_columns = 0;  // lookup-table planes
  HighCells high;             // zipper weights, whose low part is bit-planes or, with no stored planes, int4
  // [columns], a permutation: what the weight's column i multiplies is element order[i] of the input. null: element i. Of
  // packed weights that are not nested.
  const int32_t* order = nullptr;
  mlspec_hadamard hadamard = {nullptr, 1, 1, 1};  // what its inputs are multiplied by first; of o and down

  bool rotates() const { return hadamard.size > 1; }

  // int4: the last so many inputs have int8 weights, whose high and then whose low nibbles are columns of the tiles. `order` names
  // these inputs twice.
  int64_t outliers = 0;
  int64_t columns() const { return in_features + outliers; }

  LowRank adapter;  // of a layer's linears but its experts

  int64_t block = -1;  // 2 i of the attention of layer i, 2 i + 1 of its MLP; -1: none that Pass::widths speaks of

  float activation_clip = 1.0f;  // int4: mlspec_acts::clip of its activations

  // Whether a call has a choice.
  bool is_packed() const { return format != WeightFormat::kBf16 && format != WeightFormat::kF32; }

  // What it reads in a call that asks for `asked`.
  Bits at(Bits asked) const {
    if (!is_packed()) return own;
    const int64_t weight = asked.weight ? asked.weight : own.weight;
    if (format == WeightFormat::kPlanes || format == WeightFormat::kLut ||
        (format == WeightFormat::kNested && weight == 16))
      return {weight, asked.activation ? asked.activation : 16};
    return {weight, asked.activation ? asked.activation : own.activation};
  }

  // Whether a call reads planes that have to come first.
  bool fetches(Bits asked) const { return resident_planes > 0 && at(asked).weight > resident_planes; }

  // Inputs that share a scale as integers, of a weight in two: 64, or 32 where 64 do not divide them.
  int64_t zipper_group() const { return in_features % 64 ? 32 : 64; }

  // Bytes that a call reads of 16 outputs, nearly.
  int64_t bytes_per_tile(Bits asked) const { return cpu_tiles::kTileOutputs * columns() * at(asked).weight / 8; }
};

}  // namespace mlspec
