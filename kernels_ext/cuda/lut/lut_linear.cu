// x [tokens, in] times the first planes of a weight of lookup-table planes [out, in], bfloat16 activations.
#include "lut_linear.h"

#include "lut_linear.cuh"

extern "C" const char* mlspec_cuda_lut_linear(const mlspec_cuda_linear* args) {
  using namespace mlspec;
  if (const char* problem = problem_of(*args, 32)) return problem;
  if (const char* problem = problem_of_lut(*args)) return problem;
  switch ((args->num_planes - 1) / 2) {
    case 0: return launch_lut_1_2(*args);
    case 1: return launch_lut_3_4(*args);
    case 2: return launch_lut_5_6(*args);
    default: return launch_lut_7_8(*args);
  }
}
