// Weights of which 3 or 4 planes are read.
#include "lut_linear.cuh"

const char* mlspec::launch_lut_3_4(const mlspec_cuda_linear& a) {
  return a.num_planes == 3 ? launch_lut<3>(a) : launch_lut<4>(a);
}
