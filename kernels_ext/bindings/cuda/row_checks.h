// What do the bindings of rows and of attention on a GPU check and ask alike?
#pragma once
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cmath>
#include <optional>

#include "device.h"
#include "../../cuda/rows/rows.h"

namespace mlspec {

using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kVectorBytes = 16;

inline mlspec_cuda_row_launch how(const CudaCall& call) { return {call.stream(), call.overlap(), call.capability() >= 90}; }

inline void check_bf16(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kBFloat16, op, ": ", name, " is ", t.scalar_type(),
                   ", the CUDA kernels take bfloat16: load the model in it");
}

inline bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kVectorBytes == 0; }

// Rows one behind the other, as kernels read them; what lies so already is not copied.
inline Tensor dense(const Tensor& t) {
  const Tensor rows = t.contiguous();
  return is_aligned(rows) ? rows : rows.clone();
}

// A dense vector of int32 (or `dtype`) beside `first`.
inline void check_vector(const char* op, const char* name, const Tensor& t, int64_t count, const char* first_name, const Tensor& first,
                  at::ScalarType dtype = at::kInt) {
  check_part(op, name, t, dtype, {count}, first_name, first, t.element_size());
}

inline void check_softcap(const char* op, double softcap) {
  TORCH_CHECK_VALUE(softcap >= 0 && std::isfinite(softcap), op, ": softcap is ", softcap, ", expected 0 (none) or a positive number");
}

struct DeviceLimits {
  std::atomic<int> shared_bytes{0}, multiprocessors{0};
};

// Of a block, and of the GPU; asked once per device.
inline const DeviceLimits& limits_of(const CudaCall& call, c10::DeviceIndex device) {
  static std::array<DeviceLimits, C10_COMPILE_TIME_MAX_GPUS> known;
  DeviceLimits& limits = known[device];
  if (limits.multiprocessors.load()) return limits;
  int shared = 0, multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  call.check(error == cudaSuccess ? nullptr : cudaGetErrorString(error));
  limits.shared_bytes.store(shared);
  limits.multiprocessors.store(multiprocessors);
  return limits;
}

}  // namespace mlspec
