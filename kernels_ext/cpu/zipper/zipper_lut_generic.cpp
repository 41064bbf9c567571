// Sparse high parts from tables of sums, without intrinsics: any processor.
#include <cmath>
#include <cstdint>

#include "../kernels.h"

namespace {

float coefficient(int32_t term) {
  const float power = static_cast<float>(1 << (term >> 8 & 7));
  return term >> 11 & 1 ? -power : power;
}

void multiply(const mlspec_zipper_args& a, int64_t out_begin, int64_t out_end) {
  for (int64_t out = out_begin; out < out_end; ++out) {
    float partial[MLSPEC_ZIPPER_LANES][8] = {};
    const int32_t begin = a.starts[out], end = a.starts[out + 1];
    for (int32_t j = begin; j < end; ++j) {
      const int32_t term = a.terms[j];
      const float* const sums = a.tables + ((term & 15) * a.groups + (term >> 12)) * a.lanes;
      const float times = coefficient(term);
      for (int64_t lane = 0; lane < a.rows; ++lane) partial[lane][(j - begin) & 7] += times * sums[lane];
    }
    for (int64_t lane = 0; lane < a.rows; ++lane) {
      float* const own = partial[lane];
      for (int apart = 4; apart > 0; apart /= 2)
        for (int i = 0; i < apart; ++i) own[i] += own[i + apart];
      float& y = a.y[lane * a.y_stride + out];
      y = std::fma(a.step[out], own[0], y);
    }
  }
}

}  // namespace

extern "C" void mlspec_zipper_lut_generic(const mlspec_zipper_args* args, int64_t out_begin, int64_t out_end) {
  multiply(*args, out_begin, out_end);
}
