// x [tokens, in] times a bfloat16 weight [out, in], the same bits for a token however many share the call.
#include "linear_launch.cuh"

extern "C" const char* mlspec_cuda_bf16_linear(const mlspec_cuda_linear* args) {
  return mlspec::launch_tokens<mlspec::Bf16Weights, true>(*args);
}
