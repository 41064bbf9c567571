// Weights of which 5 or 6 planes are read.
#include "planes_linear.cuh"

const char* mlspec::launch_planes_5_6(const mlspec_cuda_linear& a) {
  return a.num_planes == 5 ? launch_planes<5>(a) : launch_planes<6>(a);
}
