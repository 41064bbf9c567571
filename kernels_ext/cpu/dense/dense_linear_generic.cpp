// Dense linear without intrinsics: any processor, and the plainest statement of the order of the sums.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

namespace {

inline float widen(float value) { return value; }
inline float widen(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
struct Lanes {
  using Element = T;
  static constexpr int kStep = 8, kMaxCols = 4;
  static constexpr int rows_for(int) { return 1; }
  struct Sum {
    float lane[kStep];
  };
  using Operand = Sum;
  static Sum zero() { return Sum{}; }
  static Operand load(const T* p) { return load(p, kStep); }
  static Operand load(const T* p, int64_t count) {
    Operand v = {};
    for (int64_t i = 0; i < count; ++i) v.lane[i] = widen(p[i]);
    return v;
  }
  static Sum fma(const Operand& w, const Operand& x, Sum sum) {
    for (int i = 0; i < kStep; ++i) sum.lane[i] += w.lane[i] * x.lane[i];
    return sum;
  }
  static void add_lanes(const Sum* sum, float* total) {
    for (int s = 0; s < 4; ++s) {
      const float* v = sum[s].lane;
      total[s] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
  }
};

#include "dense_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(bf16_linear_generic, linear<Lanes<uint16_t>>)
MLSPEC_LINEAR(f32_linear_generic, linear<Lanes<float>>)
