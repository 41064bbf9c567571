// x [tokens, in] times an int4 weight [out, in], with 16-bit or int8 activations over the same tiles.
#include "linear_launch.cuh"

namespace mlspec {

template <int kGroupSize, bool kZeros>
const char* launch_int4(const mlspec_cuda_linear& a) {
  if (a.int8_activations) return launch_tokens<Int4Weights<kGroupSize, kZeros, 8>, false>(a);
  return launch_tokens<Int4Weights<kGroupSize, kZeros, 16>, false>(a);
}

}  // namespace mlspec

extern "C" const char* mlspec_cuda_int4_linear(const mlspec_cuda_linear* args) {
  const bool zeros = args->has_zeros;
  switch (args->group_size) {
    case 32: return zeros ? mlspec::launch_int4<32, true>(*args) : mlspec::launch_int4<32, false>(*args);
    case 64: return zeros ? mlspec::launch_int4<64, true>(*args) : mlspec::launch_int4<64, false>(*args);
    case 128: return zeros ? mlspec::launch_int4<128, true>(*args) : mlspec::launch_int4<128, false>(*args);
    default: return "int4 groups hold 32, 64 or 128 inputs";
  }
}
