// Lookup-table planes times bfloat16 activations without intrinsics: any processor, and the plainest statement of the sums.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

namespace {

#include "lut_linear_tile.h"
#include "../lanes_generic.h"

constexpr int kTokens = 4, kSums = 8;

inline float rounded_to_bfloat16(float value) {  // of a finite number
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits_float((bits + 0x7FFFu + (bits >> 16 & 1)) & 0xFFFF0000u);
}

// The values of one output's step, in the order of the elements.
void look_up(const uint8_t* bytes, int64_t plane_bytes, int64_t planes, const float* table, float* values) {
  for (int k = 0; k < kStep; ++k) {
    const int e = k % 32, place = 4 * (k / 32) + 2 * (e & 1) + (e >> 1 & 1), bit = 4 * (e >> 2 & 1) + e / 8;
    uint32_t number = 0;
    for (int64_t plane = 0; plane < planes; ++plane) number = number << 1 | (bytes[plane * plane_bytes + place] >> bit & 1);
    values[k] = table[number];
  }
}

void multiply(const mlspec_linear_args& a, int64_t tile, int64_t row, int64_t token, int count, const float* table,
              float (*sums)[kTileOutputs]) {
  const uint16_t* const x = static_cast<const uint16_t*>(a.acts->data) + token * a.in_features;
  float acc[kTokens][kSums] = {};
  const Steps steps(a);
  for (int64_t s = 0, first = 0; s < steps.count; ++s, first += kStep) {
    uint8_t last[kMaxPlanes * kStepBytes];
    int64_t plane_bytes;
    const uint8_t* const step = steps.at(a, tile, s, last, &plane_bytes);
    float values[kStep];
    look_up(step + row * kRowBytes, plane_bytes, a.num_planes, table, values);
    const int64_t elements = std::min<int64_t>(kStep, a.in_features - first);
    for (int t = 0; t < count; ++t) {
      const uint16_t* const own = x + t * a.in_features + first;
      for (int64_t k = 0; k < elements; k += kSums) {
        for (int i = 0; i < kSums; ++i) acc[t][i] += values[k + i] * bits_float(static_cast<uint32_t>(own[k + i]) << 16);
      }
    }
  }
  for (int t = 0; t < count; ++t) {
    const float* const s = acc[t];
    sums[t][row] = ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
  }
}

void lut_linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs;
  for (int64_t tile = out_begin / kTileOutputs; tile < tile_end; ++tile) {
    float tables[kTileOutputs][1 << kMaxPlanes];
    for (int64_t row = 0; row < kTileOutputs; ++row) {
      const uint16_t* const from = table_of(a, tile, row);
      for (int number = 0; number < 1 << a.num_planes; ++number)
        tables[row][number] = rounded_to_bfloat16(widen_float16(from[number]));
    }
    for (int64_t token = 0; token < a.acts->num_rows; token += kTokens) {
      const int count = static_cast<int>(std::min<int64_t>(kTokens, a.acts->num_rows - token));
      float sums[kTokens][kTileOutputs];
      for (int64_t row = 0; row < kTileOutputs; ++row) multiply(a, tile, row, token, count, tables[row], sums);
      add_rows(a, tile, token, count, sums);
    }
  }
}

}  // namespace

MLSPEC_LINEAR(lut_linear_generic, lut_linear)
