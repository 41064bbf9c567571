// Which kernel multiplies int4 weights of one group size? One file a size, so that they compile side by side.
#pragma once

#include "linear_launch.cuh"

namespace mlspec {

template <int kGroupSize>
const char* launch_int4(const mlspec_cuda_linear& a) {
  const bool integer = a.activation_bits != 16;
  if (a.has_zeros)
    return integer ? launch_codes<Int4Weights<kGroupSize, true, 8>>(a) : launch_codes<Int4Weights<kGroupSize, true, 16>>(a);
  return integer ? launch_codes<Int4Weights<kGroupSize, false, 8>>(a) : launch_codes<Int4Weights<kGroupSize, false, 16>>(a);
}

const char* launch_int4_g32(const mlspec_cuda_linear& a);
const char* launch_int4_g64(const mlspec_cuda_linear& a);
const char* launch_int4_g128(const mlspec_cuda_linear& a);

}  // namespace mlspec
