// x [tokens, in] times the first planes of a weight of lookup-table planes [out, in] on any GPU since sm_80, bfloat16 activations.
#include "../lut/lut_linear.h"
#include "../lut/lut_linear_format.cuh"
#include "portable_linear.cuh"

extern "C" const char* mlspec_cuda_portable_lut_linear(const mlspec_cuda_linear* args) {
  if (const char* problem = mlspec::problem_of_lut(*args)) return problem;
  return mlspec::portable::launch_tokens<mlspec::AnyLutWeights, 4>(*args);
}
