// What does every CUDA binding need? The operands' device made current, its stream, its kernels, and checks of operands.
#pragma once
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>

#include "../operands.h"

#ifndef MLSPEC_CUDA_ARCHS
#error "MLSPEC_CUDA_ARCHS names the architectures of the .cu files, such as \"80;90a\": setup.py defines it"
#endif

namespace mlspec {

// 10 * major + minor of a GPU: 90 for Hopper. Asked once per device; allowed while a graph is being captured.
inline int compute_capability(c10::DeviceIndex device) {
  static std::array<std::atomic<int>, C10_COMPILE_TIME_MAX_GPUS> known{};
  int found = known[device].load(std::memory_order_relaxed);
  if (found) return found;
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  TORCH_CHECK(error == cudaSuccess, "hf_mlspec: cuda:", int(device), " cannot be asked for its compute capability: ",
              cudaGetErrorString(error));
  found = 10 * major + minor;
  known[device].store(found, std::memory_order_relaxed);
  return found;
}

// MLSPEC_CUDA_KERNELS=portable: the kernels for every GPU on Hopper, too.
inline bool portable_is_forced() {
  static const std::string asked = [] {
    const char* value = std::getenv("MLSPEC_CUDA_KERNELS");
    return std::string(value ? value : "");
  }();
  TORCH_CHECK_VALUE(asked.empty() || asked == "portable", "MLSPEC_CUDA_KERNELS is \"", asked,
                    "\": set it to \"portable\", or unset it for the best kernels of the GPU");
  return asked == "portable";
}

inline bool hopper_serves(int capability) { return MLSPEC_HOPPER && capability == 90 && !portable_is_forced(); }

// One op call on a GPU: while it lives, the operands' device is the current one.
class CudaCall {
 public:
  CudaCall(const char* op, const at::Tensor& first)
      : op_(op), guard_(first.device()), stream_(c10::cuda::getCurrentCUDAStream(first.device().index())) {
    const cudaError_t error = cudaStreamIsCapturing(stream_, &capture_);
    check(error == cudaSuccess ? nullptr : cudaGetErrorString(error));
  }

  void* stream() const { return stream_.stream(); }

  bool capturing() const { return capture_ != cudaStreamCaptureStatusNone; }

  int capability() const { return compute_capability(stream_.device_index()); }

  // Whether kernels are launched with programmatic dependent launch: they may start while the one in front ends. Only in
  // graphs, whose kernels are known to call wait_for_previous_kernel() before they touch what another one writes.
  bool overlap() const { return capture_ == cudaStreamCaptureStatusActive && capability() >= 90; }

  // problem: what a function of the C interface returned, null where nothing went wrong.
  void check(const char* problem) const {
    TORCH_CHECK(!problem, op_, " on cuda:", int(stream_.device_index()), ": ", problem, " (the CUDA kernels of hf_mlspec are built for ",
                MLSPEC_CUDA_ARCHS, ")");
  }

 private:
  const char* op_;
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  cudaStreamCaptureStatus capture_ = cudaStreamCaptureStatusNone;
};

inline void check_device(const char* op, const char* name, const at::Tensor& t, const char* first_name, const at::Tensor& first) {
  TORCH_CHECK_VALUE(t.device() == first.device(), op, ": ", name, " is on ", t.device(), ", ", first_name, " on ", first.device(),
                    "; move them to one device");
}

// A tensor the kernel reads or writes as it lies: dtype, shape, device of `first`, contiguous, starting at a multiple of `bytes`.
inline void check_part(const char* op, const char* name, const at::Tensor& t, at::ScalarType dtype, at::IntArrayRef shape,
                       const char* first_name, const at::Tensor& first, int64_t bytes = 16) {
  check_dtype(op, name, t, dtype);
  check_shape(op, name, t, shape);
  check_device(op, name, t, first_name, first);
  check_contiguous(op, name, t);
  if (t.numel() > 0) check_aligned(op, name, t, bytes);
}

}  // namespace mlspec
