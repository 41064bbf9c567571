// What do the linears of packed weights need of a processor without intrinsics? Sixteen floats, and rows of x as they lie.
//
// Included inside the anonymous namespaces of {w4a16,planes}_linear_generic.cpp.

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

struct Lanes {
  struct Float {
    float lane[16];
  };
  static constexpr int kVectors = 1, kMaxTokens = 4;

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
};
