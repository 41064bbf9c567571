// Weights of which 1 or 2 planes are read.
#include "planes_linear.cuh"

const char* mlspec::launch_planes_1_2(const mlspec_cuda_linear& a) {
  return a.num_planes == 1 ? launch_planes<1>(a) : launch_planes<2>(a);
}
