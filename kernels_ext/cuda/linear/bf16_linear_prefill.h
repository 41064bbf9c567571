// When does the kernel for many tokens serve a bfloat16 weight?
#pragma once

#include "linear_launch.cuh"

namespace mlspec {

constexpr int kPrefillVariant = 1;  // of mlspec_cuda_linear::variant

bool prefill_is_faster(const mlspec_cuda_linear& args);
const char* launch_bf16_prefill(const mlspec_cuda_linear& args);

}  // namespace mlspec
