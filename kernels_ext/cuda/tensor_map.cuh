// How does the copy engine learn of a tensor's shape, and how are boxes of more than two axes copied?
#pragma once

#include <cudaTypedefs.h>

#include "ptx.cuh"

namespace mlspec {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found == cudaDriverEntryPointSuccess ? function : nullptr);
  }();
  return encoder;
}

// One box of a tensor [d, c, b, a], its corner at these numbers; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void copy_box_4d(uint32_t to, const CUtensorMap* map, int a, int b, int c, int d, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
      : "memory");
}

}  // namespace mlspec
