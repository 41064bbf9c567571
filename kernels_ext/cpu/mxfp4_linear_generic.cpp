// MXFP4 linear without intrinsics: any processor, and the plainest statement of the order of the sums.
#include <cstdint>
#include <cstring>
#include <utility>

#include "../formats.h"
#include "kernels.h"

namespace {
using namespace mlspec;

struct Vec {
  float lane[16];
  static constexpr int kMaxCols = 4;
  static constexpr int rows_for(int) { return 1; }
  static Vec zero() { return Vec{}; }
  static Vec load(const float* p) {
    Vec v;
    std::memcpy(v.lane, p, sizeof v.lane);
    return v;
  }
  static Vec fma(const Vec& a, const Vec& b, Vec c) {
    for (int i = 0; i < 16; ++i) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
  }
  static float sum(Vec v) {
    for (int half = 8; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) v.lane[i] += v.lane[i + half];
    return v.lane[0];
  }
  struct Decoder {
    float scaled[16];
    explicit Decoder(const float* scale) {
      for (int i = 0; i < 16; ++i) scaled[i] = kE2M1[i] * *scale;
    }
    void decode(const uint8_t* bytes, Vec& even, Vec& odd) const {
      for (int i = 0; i < 16; ++i) {
        even.lane[i] = scaled[bytes[i] & 15];
        odd.lane[i] = scaled[bytes[i] >> 4];
      }
    }
  };
};

#include "mxfp4_linear_tile.h"

}  // namespace

extern "C" void mlspec_split_x_generic(const void* x, mlspec_dtype dtype, int64_t in_features, int64_t row_begin,
                                       int64_t row_end, float* out) {
  split_x(x, dtype, in_features, row_begin, row_end, out);
}

extern "C" void mlspec_mxfp4_linear_generic(const mlspec_mxfp4_linear_args* args, int64_t begin, int64_t end) {
  linear(*args, begin, end);
}
