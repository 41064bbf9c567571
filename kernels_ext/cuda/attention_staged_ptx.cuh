// Which instructions does attention need beyond ptx.cuh and mma.cuh? All of them exist since sm_80.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace mlspec {

// 16 bytes from global to shared memory, zeros unless `inside`.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float staged_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void staged_prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

}  // namespace mlspec
