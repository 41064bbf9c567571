// x [tokens, in] times an MXFP4 weight [out, in], with 16-bit or int8 activations over the same tiles.
#include "linear_launch.cuh"

extern "C" const char* mlspec_cuda_mxfp4_linear(const mlspec_cuda_linear* args) {
  using namespace mlspec;
  const mlspec_cuda_linear& a = *args;
  if (const char* problem = problem_of(a, 32)) return problem;
  if (!a.exponent_shift) return "MXFP4 needs the exponent shift that prepack wrote";
  if (a.activation_bits != 16) return launch_codes<Mxfp4IntegerWeights>(a);
  if (a.variant ? a.variant == 1622 : a.num_tokens > 64) return launch<Variant<Mxfp4Weights, 16, 2, true>>(a);
  return launch_codes<Mxfp4Weights>(a);
}
