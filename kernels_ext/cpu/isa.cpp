// Which instruction set do the kernels of this process use? Asked once: cpuid and the operating system's state mask.
#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace mlspec {
namespace {

#define MLSPEC_KERNELS(isa) CpuKernels{#isa, mlspec_split_x_##isa, mlspec_mxfp4_linear_##isa}

struct Candidate {
  CpuKernels kernels;
  bool supported;
};

// __builtin_cpu_supports reads cpuid and, for AVX and AVX-512, XGETBV: registers the OS does not save count as absent.
const Candidate* candidates(int* count) {
  static const Candidate list[] = {
#if defined(__x86_64__)
      {MLSPEC_KERNELS(avx512), __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
      {MLSPEC_KERNELS(avx2), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
      {MLSPEC_KERNELS(generic), true},
  };
  *count = sizeof(list) / sizeof(list[0]);
  return list;
}

CpuKernels choose() {
  const char* wanted = std::getenv("MLSPEC_CPU_ISA");
  int count = 0;
  const Candidate* list = candidates(&count);
  std::string known;
  for (int i = 0; i < count; ++i) {
    const bool named = wanted && *wanted && std::strcmp(wanted, list[i].kernels.isa) == 0;
    if (list[i].supported && (named || !wanted || !*wanted)) return list[i].kernels;
    if (named) throw std::runtime_error(std::string("MLSPEC_CPU_ISA=") + wanted + " is not supported by this CPU");
    known += std::string(i ? ", " : "") + list[i].kernels.isa;
  }
  throw std::runtime_error(std::string("MLSPEC_CPU_ISA=") + wanted + " is unknown, choose one of " + known);
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels chosen = choose();
  return chosen;
}

}  // namespace mlspec
