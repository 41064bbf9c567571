// Which instructions do attention and choosing need beyond ptx.cuh and mma.cuh? Those for clusters exist since sm_90, the others
// since sm_80.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace mlspec {

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// 4, 2 or 1 bytes, below zeros.
template <int kBytes>
__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
  uint32_t value;
  if constexpr (kBytes == 4)
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  else if constexpr (kBytes == 2)
    asm volatile("{\n.reg .b16 h;\nld.shared.b16 h, [%1];\ncvt.u32.u16 %0, h;\n}" : "=r"(value) : "r"(from) : "memory");
  else
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

// The two halves of a barrier of the cluster; what was written in front of the first is visible behind the second. Nothing on
// chips before Hopper, where no kernel that calls them is launched.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// address: of this block's shared memory; the same place of the block of that rank.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t remote = address;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#endif
  return remote;
}

__device__ __forceinline__ void store_cluster(uint32_t address, uint32_t rank, float4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address(address, rank)), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
#endif
}

__device__ __forceinline__ void store_cluster(uint32_t address, uint32_t rank, float2 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(cluster_address(address, rank)), "f"(v.x), "f"(v.y) : "memory");
#endif
}

}  // namespace mlspec
