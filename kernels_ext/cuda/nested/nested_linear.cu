// x [tokens, in] times a nested BF16 weight [out, in]: its 4-bit draft, with 16-bit or int8 activations.
#include "nested_linear.cuh"

namespace mlspec {
namespace {

const char* launch_draft(const mlspec_cuda_linear& a) {
  if (a.activation_bits != 16) return launch_codes<NestedIntegerWeights>(a);
  if (a.variant ? a.variant == 1622 : a.num_tokens > 64) return launch<Variant<NestedDraftWeights, 16, 2, true>>(a);
  return launch_codes<NestedDraftWeights>(a);
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_nested_linear(const mlspec_cuda_linear* args) {
  using namespace mlspec;
  const mlspec_cuda_linear& a = *args;
  if (const char* problem = problem_of(a, 32)) return problem;
  if (const char* problem = problem_of_nested(a)) return problem;
  return a.weight_bits == 16 ? launch_nested_exact(a) : launch_draft(a);
}
