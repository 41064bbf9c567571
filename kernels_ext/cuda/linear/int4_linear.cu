// x [tokens, in] times an int4 weight [out, in], with 16-bit or int8 activations over the same tiles.
#include "int4_linear.cuh"

extern "C" const char* mlspec_cuda_int4_linear(const mlspec_cuda_linear* args) {
  using namespace mlspec;
  if (const char* problem = problem_of(*args, 32)) return problem;
  if (args->in_features % (args->group_size > 0 ? args->group_size : 1)) return "in_features must be whole groups";
  if (const char* problem = mlspec_cuda_problem_of_outliers(args)) return problem;
  switch (args->group_size) {
    case 32: return launch_int4_g32(*args);
    case 64: return launch_int4_g64(*args);
    case 128: return launch_int4_g128(*args);
    default: return "int4 groups hold 32, 64 or 128 inputs";
  }
}
