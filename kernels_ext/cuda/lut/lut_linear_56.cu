// Weights of which 5 or 6 planes are read.
#include "lut_linear.cuh"

const char* mlspec::launch_lut_5_6(const mlspec_cuda_linear& a) {
  return a.num_planes == 5 ? launch_lut<5>(a) : launch_lut<6>(a);
}
