// Rows times the bfloat16 weights [experts, out, in] of those that they were sent to.
#include "expert_linear.cuh"

extern "C" const char* mlspec_cuda_bf16_experts(const mlspec_cuda_expert_linear* args) {
  return mlspec::portable::launch_rows_of_experts<mlspec::portable::RowMajorWeights>(*args);
}
