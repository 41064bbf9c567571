// Which instruction set do the kernels of this process use?
#pragma once
#include "kernels.h"

namespace mlspec {

struct CpuKernels {
  const char* isa;  // "generic", "avx2" or "avx512"
  decltype(&mlspec_split_x_generic) split_x;
  decltype(&mlspec_mxfp4_linear_generic) mxfp4_linear;
};

// The best set that the processor and the operating system support, or the one MLSPEC_CPU_ISA names; chosen once.
// Throws std::runtime_error when that name is unknown or not supported here.
const CpuKernels& cpu_kernels();

}  // namespace mlspec
