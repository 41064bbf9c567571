// x [tokens, in] times the first planes of a bit-plane weight [out, in], bfloat16 activations.
#include "planes_linear.h"

#include "planes_linear.cuh"

extern "C" const char* mlspec_cuda_bitplane_linear(const mlspec_cuda_linear* args) {
  using namespace mlspec;
  if (const char* problem = problem_of(*args, 32)) return problem;
  if (const char* problem = problem_of_planes(*args)) return problem;
  switch ((args->num_planes - 1) / 2) {
    case 0: return launch_planes_1_2(*args);
    case 1: return launch_planes_3_4(*args);
    case 2: return launch_planes_5_6(*args);
    default: return launch_planes_7_8(*args);
  }
}
