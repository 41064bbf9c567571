// 4-bit weights times bfloat16 activations without intrinsics: any processor, and the plainest statement of the sums.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"

namespace {

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
  struct Zeros {
    uint8_t lane[16];
  };
  static constexpr int kVectors = 1, kMaxTokens = 4;
  static constexpr float kValueFactor = 1.0f;
  static constexpr int tiles_for(int) { return 1; }

  static Float zeros() { return Float{}; }
  static Float set(float scalar) {
    Float v;
    for (float& lane : v.lane) lane = scalar;
    return v;
  }
  static Float fma(const Float& a, const Float& b, Float c) {
    for (int i = 0; i < 16; ++i) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
  }
  static Float power(const uint8_t* p) {
    Float v;
    for (int i = 0; i < 16; ++i) v.lane[i] = bits_float(static_cast<uint32_t>(p[i]) << 23);
    return v;
  }
  static Float load_float16(const uint16_t* p) {
    Float v;
    for (int i = 0; i < 16; ++i) v.lane[i] = widen_float16(p[i]);
    return v;
  }
  static void store(float* p, const Float& v) { std::memcpy(p, v.lane, sizeof v.lane); }
  static Zeros load_zeros(const uint8_t* p) {
    Zeros zeros;
    std::memcpy(zeros.lane, p, sizeof zeros.lane);
    return zeros;
  }
  static void prefetch(const uint8_t*) {}

  template <int N>
  struct Tokens {
    const uint16_t* x;
    int64_t stride;
    void load(const uint16_t* block, int64_t row_stride) { x = block, stride = row_stride; }
  };

  template <class Format>
  struct Unpack {
    float values[32];
    explicit Unpack(const mlspec_linear_args& a) {
      for (int i = 0; i < 32; ++i) values[i] = Format::value(a, i);
    }
    Float look_up(const uint8_t* bytes, int shift, const Zeros& zeros) const {  // nibbles of each output's first byte
      Float v;
      for (int r = 0; r < 16; ++r) {
        const int code = (bytes[4 * r] >> shift) & 15;
        v.lane[r] = values[Format::kHasZeros ? (code - zeros.lane[r]) & 31 : code];
      }
      return v;
    }
  };

  template <class Format, int N>
  static void add_block(const Unpack<Format>& unpack, const uint8_t* weight, const Zeros& zeros, const Tokens<N>& tokens,
                        Float (&dots)[N]) {
    for (int k = 0; k < 32; ++k) {  // bytes of row k / 8, nibble k / 4 % 2
      const Float column = unpack.look_up(weight + k / 8 * 64 + k % 4, k & 4, zeros);
      for (int t = 0; t < N; ++t) {
        const float x = bits_float(static_cast<uint32_t>(tokens.x[t * tokens.stride + k]) << 16);
        dots[t] = fma(column, set(x), dots[t]);
      }
    }
  }
};

#include "w4a16_linear_tile.h"

}  // namespace

extern "C" void mlspec_mxfp4_linear_bf16_generic(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear<Mxfp4>(*args, out_begin, out_end);
}

extern "C" void mlspec_nested_linear_bf16_generic(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear<Nested>(*args, out_begin, out_end);
}

extern "C" void mlspec_int4_linear_bf16_generic(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  int4_linear(*args, out_begin, out_end);
}
