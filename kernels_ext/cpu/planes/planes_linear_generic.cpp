// Bit-planes times bfloat16 activations without intrinsics: any processor, and the plainest statement of the sums.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"

namespace {

#include "../tile_rows.h"
#include "planes_linear_codes.h"

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen_float16(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  // 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals; Inf and NaN keep the largest exponent.
  const float magnitude = shifted >= 0x0F800000u ? bits_float(shifted | 0x7F800000u) : bits_float(shifted) * 0x1p112f;
  return (half & 0x8000u) ? -magnitude : magnitude;
}

struct Isa {
  struct Float {
    float lane[16];
  };
  static constexpr int kVectors = 1, kMaxTokens = 4;
  static constexpr int tiles_for(int, int) { return 1; }

  static Float zeros() { return Float{}; }
  static Float fma(const Float& a, const Float& b, Float c) {
    for (int i = 0; i < 16; ++i) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
  }
  static Float load_float16(const uint16_t* p) {
    Float v;
    for (int i = 0; i < 16; ++i) v.lane[i] = widen_float16(p[i]);
    return v;
  }
  static void store(float* p, const Float& v) { std::memcpy(p, v.lane, sizeof v.lane); }

  template <int N>
  struct Tokens {
    const uint16_t* x;
    int64_t stride;
    void load(const uint16_t* block, int64_t row_stride) { x = block, stride = row_stride; }
  };

  template <int kParts>
  struct Unpack {
    int planes;
    int64_t plane_bytes;
    float values[1 << kMaxPlanes];
    explicit Unpack(const mlspec_linear_args& a) : planes(static_cast<int>(a.num_planes)), plane_bytes(a.plane_bytes) {
      for (int code = 0; code < 1 << planes; ++code) values[code] = 0.5f * static_cast<float>(doubled_value(a, planes, code));
    }
    Float look_up(const uint32_t (*words)[16], int bit) const {
      Float v;
      for (int r = 0; r < 16; ++r) {
        uint32_t code = 0;
        for (int plane = 0; plane < planes; ++plane) code = code << 1 | (words[plane][r] >> bit & 1);
        v.lane[r] = values[code];
      }
      return v;
    }
  };

  template <int kParts, int N>
  static void add_block(const Unpack<kParts>& unpack, const uint8_t* block, const Tokens<N>& tokens, Float (&dots)[N]) {
    uint32_t words[kMaxPlanes][16];
    for (int plane = 0; plane < unpack.planes; ++plane) {
      const uint8_t* const bytes = block + plane * unpack.plane_bytes;
      for (int r = 0; r < 16; ++r) {
        const uint8_t* const b = bytes + 4 * r;
        words[plane][r] = b[0] | b[1] << 8 | b[2] << 16 | static_cast<uint32_t>(b[3]) << 24;
      }
    }
    for (int bit = 0; bit < 32; ++bit) {
      const Float column = unpack.look_up(words, bit);
      for (int t = 0; t < N; ++t) {
        Float x;
        std::fill_n(x.lane, 16, bits_float(static_cast<uint32_t>(tokens.x[t * tokens.stride + element_of(bit)]) << 16));
        dots[t] = fma(column, x, dots[t]);
      }
    }
  }
};

#include "planes_linear_tile.h"

}  // namespace

extern "C" void mlspec_bitplane_linear_generic(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear<1>(*args, out_begin, out_end);
}
