// Rows times the MXFP4 weights of the experts that they were sent to, with 16-bit or int8 activations.
#include "expert_linear.cuh"

extern "C" const char* mlspec_cuda_mxfp4_experts(const mlspec_cuda_expert_linear* args) {
  using namespace mlspec;
  if (args->linear.activation_bits == 16) return portable::launch_rows_of_experts<Mxfp4Weights>(*args);
  return portable::launch_rows_of_experts<Mxfp4IntegerWeights>(*args);
}
