// Weights of which 7 or 8 planes are read.
#include "lut_linear.cuh"

const char* mlspec::launch_lut_7_8(const mlspec_cuda_linear& a) {
  return a.num_planes == 7 ? launch_lut<7>(a) : launch_lut<8>(a);
}
