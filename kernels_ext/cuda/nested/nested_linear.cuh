// Which kernels multiply by nested weights? The exact ones lie in a file of their own: both take long to compile.
#pragma once

#include "../linear/linear_launch.cuh"
#include "nested_linear_format.cuh"

namespace mlspec {

const char* launch_nested_exact(const mlspec_cuda_linear& a);

}  // namespace mlspec
