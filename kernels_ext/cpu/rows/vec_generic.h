// What are sixteen floats without intrinsics? An array.
//
// Included inside the anonymous namespaces of {row_ops,attention}_generic.cpp.

constexpr int kLanes = 16;

#include "row_ops_words.h"

inline float float16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7FFF;
  if (rest >= 0x7C00) return float_of(sign | 0x7F800000 | (rest & 0x3FF) << 13 | (rest > 0x7C00 ? 0x400000 : 0));
  if (rest < 0x400) return float_of(bits_of(static_cast<float>(rest) * 0x1p-24f) | sign);
  return float_of(sign | ((rest << 13) + (112u << 23)));
}

inline uint16_t float_to_float16(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return sign | 0x7E00 | (size >> 13 & 0x1FF);
  if (size >= 0x477FF000) return sign | 0x7C00;  // rounds to 65536 or more
  if (size < 0x38800000)  // below 2^-14: adding 0.5 leaves multiples of 2^-24, rounded
    return sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f));
  return sign | ((size + 0xFFF + (size >> 13 & 1) - (112u << 23)) >> 13);
}

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// The sum is in double so that no compiler may fuse it with the float product in front of it.
inline int8_t float_to_int8(float x) {  // of -127.5 to 127.5, to nearest even
  const double shifted = static_cast<double>(x) + 6755399441055744.0;  // 1.5 * 2^52: the unit of its last place is one
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return static_cast<int8_t>(bits);
}

struct Mask {
  bool lane[kLanes];
};

struct Vec {
  float lane[kLanes];
  static constexpr int kTile = 1;  // rows, and Vecs of a row, of a tile of products
  template <class F>
  static Vec of(F&& f) {
    Vec v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = f(i);
    return v;
  }
  static Vec all(float x) {
    return of([&](int) { return x; });
  }
  static Vec zero() { return Vec{}; }
  static Vec load(const float* p) { return load_first(p, kLanes); }
  static Vec load_first(const float* p, int n) {
    Vec v{};
    std::memcpy(v.lane, p, 4 * n);
    return v;
  }
  static Vec load_bfloat16(const uint16_t* p) {
    return of([&](int i) { return float_of(uint32_t(p[i]) << 16); });
  }
  static Vec load_float16(const uint16_t* p) {
    return of([&](int i) { return float16_to_float(p[i]); });
  }
  static Vec load_int8(const int8_t* p) {
    return of([&](int i) { return static_cast<float>(p[i]); });
  }
  // to: what `table` holds for 32 nibbles, the lower one of a byte first
  static void look_up_nibbles(const Vec& table, const uint8_t* p, Vec (&to)[2]) {
    for (int i = 0; i < 2 * kLanes; ++i) to[i / kLanes].lane[i % kLanes] = table.lane[i % 2 ? p[i / 2] >> 4 : p[i / 2] & 15];
  }
  void store(float* p) const { std::memcpy(p, lane, sizeof lane); }
  void store_first(float* p, int n) const { std::memcpy(p, lane, 4 * n); }
  void store_bfloat16(uint16_t* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_bfloat16(lane[i]);
  }
  void store_float16(uint16_t* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_float16(lane[i]);
  }
  void store_int8(int8_t* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_int8(lane[i]);
  }
  static float first(const Vec& v) { return v.lane[0]; }
  static float sum(Vec v) {
    for (int half = 8; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) v.lane[i] += v.lane[i + half];
    return v.lane[0];
  }
  static float largest(const Vec& v) {
    float most = v.lane[0];
    for (float x : v.lane) most = x > most ? x : most;
    return most;
  }
  static Mask lanes_between(int64_t begin, int64_t end) {
    Mask m;
    for (int i = 0; i < kLanes; ++i) m.lane[i] = begin <= i && i < end;
    return m;
  }
};

#define MLSPEC_LANEWISE(name, expression) \
  inline Vec name(const Vec& a, const Vec& b) { return Vec::of([&](int i) { return expression; }); }
MLSPEC_LANEWISE(operator+, a.lane[i] + b.lane[i])
MLSPEC_LANEWISE(operator-, a.lane[i] - b.lane[i])
MLSPEC_LANEWISE(operator*, a.lane[i] * b.lane[i])
MLSPEC_LANEWISE(operator/, a.lane[i] / b.lane[i])
MLSPEC_LANEWISE(max, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i])  // b where one is NaN
MLSPEC_LANEWISE(min, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i])
MLSPEC_LANEWISE(copy_sign, std::copysign(a.lane[i], b.lane[i]))
#undef MLSPEC_LANEWISE

inline float fma_lane(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;  // no such instruction, so no compiler fuses it here and not there
#endif
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return Vec::of([&](int i) { return fma_lane(a.lane[i], b.lane[i], c.lane[i]); });
}
inline Vec neg_fma(const Vec& a, const Vec& b, const Vec& c) {
  return Vec::of([&](int i) { return fma_lane(-a.lane[i], b.lane[i], c.lane[i]); });
}
inline Vec abs(const Vec& a) {
  return Vec::of([&](int i) { return std::fabs(a.lane[i]); });
}

// x * 2^n; shifted is n + 1.5 * 2^23, whose low bits are the integer. In two steps, so that subnormal results round.
inline Vec times_power_of_two(const Vec& x, const Vec& shifted, const Vec&) {
  return Vec::of([&](int i) {
    const int32_t n = static_cast<int32_t>(bits_of(shifted.lane[i]) - 0x4B400000u), half = n >> 1;
    return x.lane[i] * float_of(uint32_t(half + 127) << 23) * float_of(uint32_t(n - half + 127) << 23);
  });
}

template <class F>
inline Mask mask_of(F&& f) {
  Mask m;
  for (int i = 0; i < kLanes; ++i) m.lane[i] = f(i);
  return m;
}
inline Mask less(const Vec& a, const Vec& b) {
  return mask_of([&](int i) { return a.lane[i] < b.lane[i]; });
}
inline Mask equal(const Vec& a, const Vec& b) {
  return mask_of([&](int i) { return a.lane[i] == b.lane[i]; });
}
inline Mask is_nan(const Vec& a) {
  return mask_of([&](int i) { return a.lane[i] != a.lane[i]; });
}
inline Vec select(const Mask& m, const Vec& yes, const Vec& no) {
  return Vec::of([&](int i) { return m.lane[i] ? yes.lane[i] : no.lane[i]; });
}
inline uint32_t bits(const Mask& m) {
  uint32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= uint32_t(m.lane[i]) << i;
  return all;
}
