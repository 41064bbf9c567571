// x [tokens, in] times an MXFP4 weight [out, in] on any GPU since sm_80, with 16-bit or int8 activations.
#include "portable_linear.cuh"
#include "portable_linear.h"

extern "C" const char* mlspec_cuda_portable_mxfp4_linear(const mlspec_cuda_linear* args) {
  if (args->activation_bits == 16) return mlspec::portable::launch_tokens<mlspec::Mxfp4Weights>(*args);
  return mlspec::portable::launch_tokens<mlspec::Mxfp4IntegerWeights>(*args);
}
