// Hadamard matrices without intrinsics: any processor.
#include <cmath>
#include <cstdint>

#include "../kernels.h"

namespace {

struct Vec {
  static constexpr int kLanes = 8;
  float lane[8];
  static Vec load(const float* p) {
    Vec v;
    for (int i = 0; i < 8; ++i) v.lane[i] = p[i];
    return v;
  }
  static Vec all(float x) {
    Vec v;
    for (float& lane : v.lane) lane = x;
    return v;
  }
  void store(float* p) const {
    for (int i = 0; i < 8; ++i) p[i] = lane[i];
  }
  static Vec fma(Vec a, const Vec& b, const Vec& c) {
    for (int i = 0; i < 8; ++i) a.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
    return a;
  }
  Vec short_levels() const {
    Vec v = *this;
    for (int apart = 1; apart < 8; apart *= 2)
      for (int i = 0; i < 8; ++i) {
        if (i & apart) continue;
        const float low = v.lane[i], high = v.lane[i + apart];
        v.lane[i] = low + high;
        v.lane[i + apart] = low - high;
      }
    return v;
  }
};

inline Vec operator+(Vec a, const Vec& b) {
  for (int i = 0; i < 8; ++i) a.lane[i] += b.lane[i];
  return a;
}

inline Vec operator-(Vec a, const Vec& b) {
  for (int i = 0; i < 8; ++i) a.lane[i] -= b.lane[i];
  return a;
}

inline Vec operator*(Vec a, const Vec& b) {
  for (int i = 0; i < 8; ++i) a.lane[i] *= b.lane[i];
  return a;
}

#include "hadamard_passes.h"

}  // namespace

MLSPEC_HADAMARD(generic)
