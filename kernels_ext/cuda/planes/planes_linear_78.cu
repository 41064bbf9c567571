// Weights of which 7 or 8 planes are read.
#include "planes_linear.cuh"

const char* mlspec::launch_planes_7_8(const mlspec_cuda_linear& a) {
  return a.num_planes == 7 ? launch_planes<7>(a) : launch_planes<8>(a);
}
