// int4 tiles to bfloat16 rows without intrinsics: any processor.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernels.h"

namespace {

using mlspec::kBlock, mlspec::cpu_tiles::kTileBytes, mlspec::cpu_tiles::kTileOutputs;

inline float widen_float16(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  const uint32_t bits = shifted >= 0x0F800000u ? shifted | 0x7F800000u : shifted;  // Inf and NaN keep the largest exponent
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  if (shifted < 0x0F800000u) magnitude *= 0x1p112f;  // the exponent's bias from 15 to 127; normalises subnormals
  return (half & 0x8000u) ? -magnitude : magnitude;
}

inline uint16_t round_bfloat16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Elements of one group of one output. bytes: of its first block; value: what a code means.
inline void write_group(const uint8_t* bytes, int64_t blocks, const uint16_t (&value)[16], uint16_t* dense) {
  for (int64_t b = 0; b < blocks; ++b, bytes += kTileBytes, dense += kBlock) {
    for (int j = 0; j < 4; ++j) {
      for (int i = 0; i < 4; ++i) {
        const uint8_t byte = bytes[64 * j + i];
        dense[8 * j + i] = value[byte & 15];
        dense[8 * j + 4 + i] = value[byte >> 4];
      }
    }
  }
}

}  // namespace

extern "C" void mlspec_int4_dequantize_generic(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end,
                                               uint16_t* dense) {
  const mlspec_linear_args& a = *args;
  const int64_t groups = a.in_features / a.group, group_blocks = a.group / kBlock;
  for (int64_t o = out_begin; o < out_end; ++o, dense += a.in_features) {
    const int64_t tile = o / kTileOutputs, r = o % kTileOutputs;
    const uint8_t* bytes = static_cast<const uint8_t*>(a.weight) + tile * a.in_features / kBlock * kTileBytes + 4 * r;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = (tile * groups + g) * kTileOutputs + r;
      const float scale = widen_float16(static_cast<const uint16_t*>(a.scale)[at]);
      const int zero = a.zero ? a.zero[at] : 8;
      uint16_t value[16];
      for (int code = 0; code < 16; ++code) value[code] = round_bfloat16(static_cast<float>(code - zero) * scale);
      write_group(bytes + g * group_blocks * kTileBytes, group_blocks, value, dense + g * a.group);
    }
  }
}
