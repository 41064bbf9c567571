// x [tokens, in] times the 4-bit draft of a nested BF16 weight on any GPU since sm_80, with 16-bit or int8 activations.
#include "../nested/nested_linear_format.cuh"
#include "portable_linear.cuh"
#include "portable_linear.h"
#include "portable_nested.cuh"

extern "C" const char* mlspec_cuda_portable_nested_linear(const mlspec_cuda_linear* args) {
  using namespace mlspec;
  const mlspec_cuda_linear& a = *args;
  if (const char* problem = problem_of_nested(a)) return problem;
  if (a.weight_bits == 16) return portable::launch_nested_exact(a);
  if (a.activation_bits == 16) return portable::launch_tokens<NestedDraftWeights>(a);
  return portable::launch_tokens<NestedIntegerWeights>(a);
}
