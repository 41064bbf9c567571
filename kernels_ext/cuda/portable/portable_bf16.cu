// x [tokens, in] times a bfloat16 weight [out, in] on any GPU since sm_80.
#include "portable_linear.cuh"
#include "portable_linear.h"

extern "C" const char* mlspec_cuda_portable_bf16_linear(const mlspec_cuda_linear* args) {
  return mlspec::portable::launch_tokens<mlspec::portable::RowMajorWeights>(*args);
}
