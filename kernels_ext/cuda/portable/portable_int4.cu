// x [tokens, in] times an int4 weight [out, in] on any GPU since sm_80, with 16-bit or int8 activations over the same tiles.
#include "portable_linear.cuh"
#include "portable_linear.h"

namespace mlspec::portable {

template <int kGroupSize, bool kZeros>
const char* launch_int4(const mlspec_cuda_linear& a) {
  if (a.activation_bits == 16) return launch_tokens<Int4Weights<kGroupSize, kZeros, 16>>(a);
  return launch_tokens<Int4Weights<kGroupSize, kZeros, 8>>(a);
}

}  // namespace mlspec::portable

extern "C" const char* mlspec_cuda_portable_int4_linear(const mlspec_cuda_linear* args) {
  using mlspec::portable::launch_int4;
  const bool zeros = args->has_zeros;
  if (const char* problem = mlspec_cuda_problem_of_outliers(args)) return problem;
  switch (args->group_size) {
    case 32: return zeros ? launch_int4<32, true>(*args) : launch_int4<32, false>(*args);
    case 64: return zeros ? launch_int4<64, true>(*args) : launch_int4<64, false>(*args);
    case 128: return zeros ? launch_int4<128, true>(*args) : launch_int4<128, false>(*args);
    default: return "int4 groups hold 32, 64 or 128 inputs";
  }
}
