// Where the kernels for the exact values of nested weights are: in a file of their own, both take long to compile.
#pragma once

#include "../linear/linear.h"

namespace mlspec::portable {

const char* launch_nested_exact(const mlspec_cuda_linear& a);

}  // namespace mlspec::portable
