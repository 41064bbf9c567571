// x [tokens, in] times an MXFP4 weight [out, in], 16-bit activations.
#include "linear_launch.cuh"

extern "C" const char* mlspec_cuda_mxfp4_linear(const mlspec_cuda_linear* args) {
  return mlspec::launch_tokens<mlspec::Mxfp4Weights, true>(*args);
}
