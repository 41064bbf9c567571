// Rows times the int4 weights of the experts that they were sent to, with 16-bit or int8 activations over the same tiles.
#include "expert_linear.cuh"

namespace mlspec::portable {

template <int kGroupSize, bool kZeros>
const char* launch_int4(const mlspec_cuda_expert_linear& a) {
  if (a.linear.activation_bits == 16) return launch_rows_of_experts<Int4Weights<kGroupSize, kZeros, 16>>(a);
  return launch_rows_of_experts<Int4Weights<kGroupSize, kZeros, 8>>(a);
}

}  // namespace mlspec::portable

extern "C" const char* mlspec_cuda_int4_experts(const mlspec_cuda_expert_linear* args) {
  using mlspec::portable::launch_int4;
  const bool zeros = args->linear.has_zeros;
  switch (args->linear.group_size) {
    case 32: return zeros ? launch_int4<32, true>(*args) : launch_int4<32, false>(*args);
    case 64: return zeros ? launch_int4<64, true>(*args) : launch_int4<64, false>(*args);
    case 128: return zeros ? launch_int4<128, true>(*args) : launch_int4<128, false>(*args);
    default: return "int4 groups hold 32, 64 or 128 inputs";
  }
}
