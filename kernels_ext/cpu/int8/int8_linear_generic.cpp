// Weights of few bits times int8 activations in plain C++: one output at a time, the same integers and fma chain.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

namespace {

#include "../planes/planes_linear_codes.h"

using mlspec::cpu_tiles::kTileBytes, mlspec::cpu_tiles::kTileOutputs;

constexpr struct DoubledE2M1 {
  int of[16] = {};
  constexpr DoubledE2M1() {
    for (int i = 0; i < 8; ++i) of[i] = mlspec::kDoubledMagnitudes.of[i], of[i + 8] = -of[i];
  }
} kDoubledE2M1;

float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float from_float16(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  // 2^112 moves the exponent bias from 15 to 127 and normalises subnormals; Inf and NaN keep the largest exponent.
  uint32_t magnitude = shifted | 0x7F800000u;
  if (shifted < 0x0F800000u) {
    const float value = bits_to_float(shifted) * bits_to_float(0x77800000u);
    std::memcpy(&magnitude, &value, sizeof magnitude);
  }
  return bits_to_float(magnitude | static_cast<uint32_t>(half & 0x8000u) << 16);
}

// Values of one group of one output of 4-bit tiles, in the order of x; at: index of its scale, group: its number.
template <class Format>
struct NibbleTiles {
  static int64_t scale_row(const mlspec_linear_args&, int64_t tile, int64_t group, int64_t groups) { return tile * groups + group; }
  static void unpack_group(const mlspec_linear_args& a, int64_t at, int64_t out, int64_t group, int64_t blocks, int16_t* values) {
    const int64_t first = out / kTileOutputs * (a.in_features / kBlock) + group * blocks;
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + first * kTileBytes + 4 * (out % kTileOutputs);
    for (int64_t b = 0; b < blocks; ++b, weight += kTileBytes) {
      for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 4; ++i, ++values) {
          const int byte = weight[64 * j + i];
          values[0] = static_cast<int16_t>(Format::value(a, at, byte & 15));
          values[4] = static_cast<int16_t>(Format::value(a, at, byte >> 4));
        }
        values += 4;
      }
    }
  }
};

struct Mxfp4 : NibbleTiles<Mxfp4> {
  static int64_t blocks_per_group(const mlspec_linear_args&) { return 1; }
  static int value(const mlspec_linear_args&, int64_t, int code) { return kDoubledE2M1.of[code]; }
  static float scale(const mlspec_linear_args& a, int64_t at) {  // 2^(byte - 128), byte 0 is 0, 255 is NaN
    const uint32_t byte = static_cast<const uint8_t*>(a.scale)[at];
    return byte == 255 ? bits_to_float(0x7FC00000u) : bits_to_float(byte << 23) * 0.5f;
  }
};

struct Nested : NibbleTiles<Nested> {
  static int64_t blocks_per_group(const mlspec_linear_args&) { return 1; }
  static int value(const mlspec_linear_args& a, int64_t, int code) { return code < 8 ? a.codebook[code] : -a.codebook[code - 8]; }
  static float scale(const mlspec_linear_args& a, int64_t at) {  // 2^(byte - 132), byte >= 31
    return bits_to_float(static_cast<uint32_t>(static_cast<const uint8_t*>(a.scale)[at]) << 23) * 0x1p-5f;
  }
};

struct Int4 : NibbleTiles<Int4> {
  static int64_t blocks_per_group(const mlspec_linear_args& a) { return a.group / kBlock; }
  static int value(const mlspec_linear_args& a, int64_t at, int code) { return code - (a.zero ? a.zero[at] : 8); }
  static float scale(const mlspec_linear_args& a, int64_t at) {
    return from_float16(static_cast<const uint16_t*>(a.scale)[at]);
  }
};

// Bit-planes, whose scales may be those of larger groups than the activations have.
struct Planes {
  static int64_t blocks_per_group(const mlspec_linear_args& a) { return a.acts->group / kBlock; }
  static float scale(const mlspec_linear_args& a, int64_t at) { return Int4::scale(a, at); }
  static int64_t scale_row(const mlspec_linear_args& a, int64_t tile, int64_t group, int64_t) {
    return tile * (a.in_features / a.group) + group * a.acts->group / a.group;
  }
  static void unpack_group(const mlspec_linear_args& a, int64_t, int64_t out, int64_t group, int64_t blocks, int16_t* values) {
    const int64_t first = out / kTileOutputs * (a.in_features / kBlock) + group * blocks;
    const uint8_t* block = static_cast<const uint8_t*>(a.weight) + first * kPlaneBytes + 4 * (out % kTileOutputs);
    for (int64_t b = 0; b < blocks; ++b, block += kPlaneBytes, values += kBlock) {
      for (int bit = 0; bit < kBlock; ++bit) {
        int code = 0;
        for (int64_t plane = 0; plane < a.num_planes; ++plane)
          code = code << 1 | (block[plane * a.plane_bytes + bit / 8] >> bit % 8 & 1);
        values[element_of(bit)] = static_cast<int16_t>(code - (1 << (a.num_planes - 1)));
      }
    }
  }
};

template <class Format>
float dot_row(const mlspec_linear_args& a, int64_t out, int64_t token) {
  const int64_t blocks = a.in_features / kBlock, group_blocks = Format::blocks_per_group(a);
  const int64_t groups = blocks / group_blocks, tile = out / kTileOutputs, lane = out % kTileOutputs;
  const int8_t* x = mlspec_acts_codes(a.acts) + token * a.in_features;
  const float* x_scale = mlspec_acts_scales(a.acts) + token * groups;
  float acc = 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = Format::scale_row(a, tile, g, groups) * kTileOutputs + lane, size = group_blocks * kBlock;
    int16_t values[128];
    Format::unpack_group(a, at, out, g, group_blocks, values);
    int32_t dots = 0;
    for (int64_t k = 0; k < size; ++k) dots += values[k] * x[g * size + k];
    acc = std::fma(static_cast<float>(dots), Format::scale(a, at) * x_scale[g], acc);
  }
  return acc;
}

template <class Format>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  for (int64_t out = out_begin; out < out_end; ++out) {
    for (int64_t token = 0; token < a.acts->num_rows; ++token) {
      float* y = a.y + token * a.y_stride + out;
      const float sum = dot_row<Format>(a, out, token), value = a.bias ? sum + a.bias[out] : sum;
      *y = a.accumulate ? *y + value : value;
    }
  }
}

}  // namespace

MLSPEC_LINEAR(mxfp4_linear_int8_generic, linear<Mxfp4>)
MLSPEC_LINEAR(nested_linear_int8_generic, linear<Nested>)
MLSPEC_LINEAR(int4_linear_int8_generic, linear<Int4>)
MLSPEC_LINEAR(bitplane_linear_int8_generic, linear<Planes>)
