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

inline constexpr const char* kActivationNames = "{'silu': 0, 'gelu_pytorch_tanh': 1, 'gelu_new': 1, 'gelu': 2, 'relu': 3, 'relu2': 4}";

inline void check_gate_up(const char* op, const Tensor& gate_up) {
  check_bf16(op, "gate_up", gate_up);
  TORCH_CHECK_VALUE(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, op, ": gate_up has shape ", gate_up.sizes(),
                    ", expected [n, 2 * intermediate]");
}

inline void check_gated(const char* op, const Tensor& gate_up, int64_t activation) {
  check_gate_up(op, gate_up);
  TORCH_CHECK_VALUE(activation >= 0 && activation <= 4, op, ": activation is ", activation, ", choose one of ", kActivationNames);
}

// Operands of a norm [..., width]; of one whose columns are put in an order: [n, width].
inline void check_norm(const char* op, const Tensor& x, const Tensor& weight, const Maybe& residual, const Tensor* order) {
  check_bf16(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x is a scalar, it must have at least one axis");
  const int64_t width = x.size(-1);
  float_dtype(op, "weight", weight);
  check_shape(op, "weight", weight, {width});
  check_device(op, "weight", weight, "x", x);
  if (residual) {
    check_bf16(op, "residual", *residual);
    check_shape(op, "residual", *residual, x.sizes());
    check_device(op, "residual", *residual, "x", x);
  }
  if (!order) return;
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, width]");
  check_vector(op, "order", *order, width, "x", x);
}

// Hadamard matrices of rows of x, or of gated rows; width: of what is rotated.
inline void check_matrices(const char* op, const Maybe& matrix, int64_t size, int64_t inner, const Tensor& x, const char* name,
                           int64_t width, bool gated) {
  const int64_t order = matrix ? matrix->dim() ? matrix->size(0) : 0 : 1;
  if (matrix) check_part(op, "matrix", *matrix, at::kFloat, {order, order}, name, x, kVectorBytes);
  TORCH_CHECK_VALUE(!matrix || (order > 0 && order % 4 == 0 && order <= MLSPEC_HADAMARD_MAX_ORDER), op, ": matrix has ", order,
                    " rows, expected a multiple of 4 up to ", int64_t(MLSPEC_HADAMARD_MAX_ORDER));
  const int64_t powers = size / order;
  TORCH_CHECK_VALUE(size > 0 && size % order == 0 && (powers & (powers - 1)) == 0, op, ": size is ", size, ", expected ", order,
                    " times a power of two");
  TORCH_CHECK_VALUE(inner > 0 && width % (size * inner) == 0, op, ": ", gated ? "gated rows have " : "x has ", width,
                    " columns, size ", size, " times inner ", inner, " does not divide them");
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

// Checked matrices over `n` dense rows; `out` is not set.
inline mlspec_cuda_hadamard hadamard_of(const CudaCall& call, const Tensor& rows, const Maybe& matrix, int64_t size, int64_t inner,
                                        int64_t n, int64_t width, int32_t activation) {
  return {rows.const_data_ptr(), matrix ? matrix->const_data_ptr<float>() : nullptr, nullptr, n, width, matrix ? matrix->size(0) : 1,
          size, inner, limits_of(call, rows.device().index()).shared_bytes,
          static_cast<float>(1.0 / std::sqrt(static_cast<double>(size))), activation};
}

}  // namespace mlspec
