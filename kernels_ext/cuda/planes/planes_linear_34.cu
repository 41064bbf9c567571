// Weights of which 3 or 4 planes are read.
#include "planes_linear.cuh"

const char* mlspec::launch_planes_3_4(const mlspec_cuda_linear& a) {
  return a.num_planes == 3 ? launch_planes<3>(a) : launch_planes<4>(a);
}
