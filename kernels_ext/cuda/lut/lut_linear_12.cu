// Weights of which 1 or 2 planes are read.
#include "lut_linear.cuh"

const char* mlspec::launch_lut_1_2(const mlspec_cuda_linear& a) {
  return a.num_planes == 1 ? launch_lut<1>(a) : launch_lut<2>(a);
}
