// Weights in groups of 32 of which as many planes are read as the device says.
#include "planes_linear_chosen.cuh"

const char* mlspec::launch_chosen_32(const mlspec_cuda_linear& a, int num_planes) {
  return launch_chosen_of_group<32>(a, num_planes);
}
