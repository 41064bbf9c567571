// x [tokens, in] times as many planes of a bit-plane weight [out, in] as the device says, bfloat16 activations.
#include "planes_linear.h"

#include "planes_linear_chosen.cuh"

extern "C" const char* mlspec_cuda_bitplane_chosen(const mlspec_cuda_linear* args) {
  using namespace mlspec;
  if (const char* problem = problem_of(*args, 32)) return problem;
  if (const char* problem = problem_of_planes(*args)) return problem;
  if (!args->widths || (args->num_widths != 1 && args->num_widths != args->num_tokens)) return "widths must be one, or one a token";
  switch (args->group_size) {
    case 32: return launch_chosen_32(*args, args->num_planes);
    case 64: return launch_chosen_64(*args, args->num_planes);
    default: return launch_chosen_128(*args, args->num_planes);
  }
}
