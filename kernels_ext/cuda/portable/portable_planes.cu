// x [tokens, in] times the first planes of a bit-plane weight [out, in] on any GPU since sm_80, bfloat16 activations.
#include "../planes/planes_linear.h"
#include "../planes/planes_linear_format.cuh"
#include "portable_linear.cuh"

extern "C" const char* mlspec_cuda_portable_bitplane_linear(const mlspec_cuda_linear* args) {
  using mlspec::AnyPlaneWeights, mlspec::portable::launch_tokens;
  if (const char* problem = mlspec::problem_of_planes(*args)) return problem;
  switch (args->group_size) {
    case 32: return launch_tokens<AnyPlaneWeights<32>, 4>(*args);
    case 64: return launch_tokens<AnyPlaneWeights<64>, 4>(*args);
    default: return launch_tokens<AnyPlaneWeights<128>, 4>(*args);
  }
}
