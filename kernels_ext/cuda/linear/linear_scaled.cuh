// How do the dots of a group meet their scales? Behind the product by mma, in Hopper's and in the portable kernels alike.
#pragma once

#include <stdint.h>

namespace mlspec {

// sums += scale of the row (and of the token) * dots. With int8 activations dots are integers and, for int4 with zero points,
// token_sums the sums of the tokens' codes: a zero point is subtracted behind the product.
template <class V>
__device__ __forceinline__ void add_scaled(float (&sums)[V::kTokenTiles][4], const typename V::Dot (&dots)[V::kTokenTiles][4],
                                           const typename V::Format& format, const float* x_scales, const int (*token_sums)[4],
                                           int group, int lane) {
  const float2 scale = format.scale(group);
#pragma unroll
  for (int t = 0; t < V::kTokenTiles; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float row_scale = c < 2 ? scale.x : scale.y;
      if constexpr (V::Format::kActivationBits == 8) {
        int dot = dots[t][c];
        if constexpr (V::Format::kHasZeros) {
          const uchar2 zero = format.zero(group);
          dot -= ((c < 2 ? zero.x : zero.y) - 8) * 16 * token_sums[t][c % 2];
        }
        row_scale = __fmul_rn(row_scale, x_scales[group * V::kTokens + t * 8 + lane % 4 * 2 + c % 2]);
        sums[t][c] = __fmaf_rn(float(dot), row_scale, sums[t][c]);
      } else {
        sums[t][c] = __fmaf_rn(dots[t][c], row_scale, sums[t][c]);
      }
    }
  }
}

}  // namespace mlspec
