// Rows times the nested BF16 weights of the experts that they were sent to: exactly, with the bits of expert_bf16, or their drafts.
#include "../portable/portable_nested_halves.cuh"
#include "expert_linear.cuh"

namespace mlspec::portable {

template <>
constexpr bool kReadsMore<NestedHalfTiles> = true;
template <>
constexpr bool kReadsMore<NestedDraftWeights> = true;
template <>
constexpr bool kReadsMore<NestedIntegerWeights> = true;

}  // namespace mlspec::portable

extern "C" const char* mlspec_cuda_nested_experts(const mlspec_cuda_expert_linear* args) {
  using namespace mlspec;
  if (const char* problem = problem_of_nested(args->linear)) return problem;
  if (args->linear.weight_bits == 16) return portable::launch_rows_of_experts<portable::NestedHalfTiles>(*args);
  if (args->linear.activation_bits == 16) return portable::launch_rows_of_experts<NestedDraftWeights>(*args);
  return portable::launch_rows_of_experts<NestedIntegerWeights>(*args);
}
