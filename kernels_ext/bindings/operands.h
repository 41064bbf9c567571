// Which operands may an op have? Checks shared by the bindings; every message names the op, the operand and the numbers.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "../cpu/kernels.h"

namespace mlspec {

inline mlspec_dtype float_dtype(const char* op, const char* name, const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return MLSPEC_FLOAT32;
    case at::kBFloat16: return MLSPEC_BFLOAT16;
    case at::kHalf: return MLSPEC_FLOAT16;
    default:
      TORCH_CHECK_TYPE(false, op, ": ", name, " is ", t.scalar_type(), ", expected float32, bfloat16 or float16");
  }
}

// Which codes a cache of bytes holds: no two have one type. None where it holds keys and values as they are.
inline std::optional<mlspec_dtype> rows_of_codes(at::ScalarType type) {
  if (type == at::kChar) return MLSPEC_INT8_ROWS;
  if (type == at::kByte) return MLSPEC_INT4_ROWS;
  return std::nullopt;
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& t, at::ScalarType wanted) {
  TORCH_CHECK_TYPE(t.scalar_type() == wanted, op, ": ", name, " is ", t.scalar_type(), ", expected ", wanted);
}

inline void check_shape(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef wanted) {
  TORCH_CHECK_VALUE(t.sizes() == wanted, op, ": ", name, " has shape ", t.sizes(), ", expected ", wanted);
}

inline void check_cpu(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.is_cpu(), op, ": ", name, " is on ", t.device(), ", the other operands on cpu; move them to one device");
}

inline void check_same(const char* op, const char* name, const at::Tensor& t, const char* like_name, const at::Tensor& like) {
  TORCH_CHECK_TYPE(t.scalar_type() == like.scalar_type(), op, ": ", name, " is ", t.scalar_type(), ", ", like_name, " is ",
                   like.scalar_type());
  check_shape(op, name, t, like.sizes());
  check_cpu(op, name, t);
}

// Weights and caches are never copied in a call: that would hide a cost larger than the computation.
inline void check_contiguous(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.is_contiguous(), op, ": ", name, " of shape ", t.sizes(), " is not contiguous (strides ", t.strides(),
                    "); call .contiguous() once and keep the result");
}

// Bytes an element of t has to start at a multiple of; a tensor cut out of a byte buffer may not.
inline void check_aligned(const char* op, const char* name, const at::Tensor& t, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  TORCH_CHECK_VALUE(address % static_cast<uintptr_t>(bytes) == 0, op, ": ", name, " starts at an address that is no multiple of ",
                    bytes, " bytes; call .clone() once and keep the result");
}

// Of 4-bit activations: hf_mlspec/formats/activations.py.
inline void check_activation_clip(const char* op, double clip) {
  TORCH_CHECK_VALUE(clip >= kLeastClip && clip <= 1, op, ": activation_clip is ", clip, ", expected ", kLeastClip,
                    " to 1, a share of the largest activation of a group");
}

inline void check_one_of(const char* op, const char* name, int64_t value, at::IntArrayRef choices) {
  TORCH_CHECK_VALUE(std::find(choices.begin(), choices.end(), value) != choices.end(), op, ": ", name, " is ", value,
                    ", choose one of ", choices);
}

// Multiply-adds worth the microsecond or two of waking a thread.
inline constexpr double kWorkPerThread = 1 << 16;

inline constexpr int64_t kGrain = 4096;  // elements of light work to hand out at a time

inline int64_t rows_per_piece(int64_t elements) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements)); }

inline int threads_for(double work) {
  return static_cast<int>(std::min<double>(at::get_num_threads(), 1 + work / kWorkPerThread));
}

inline char* bytes_at(void* data, mlspec_dtype dtype, int64_t elements) {
  return static_cast<char*>(data) + elements * mlspec_element_bytes(dtype);
}

inline const char* bytes_at(const void* data, mlspec_dtype dtype, int64_t elements) {
  return static_cast<const char*>(data) + elements * mlspec_element_bytes(dtype);
}

// The operands of hadamard_rows over rows of `width`; they stay the caller's.
inline mlspec_hadamard checked_hadamard(const char* op, int64_t width, const std::optional<at::Tensor>& matrix, int64_t size,
                                        int64_t inner) {
  int64_t order = 1;
  if (matrix) {
    order = matrix->dim() ? matrix->size(0) : 0;
    check_dtype(op, "matrix", *matrix, at::kFloat);
    check_shape(op, "matrix", *matrix, {order, order});
    check_contiguous(op, "matrix", *matrix);
    check_cpu(op, "matrix", *matrix);
    TORCH_CHECK_VALUE(order > 0 && order % 4 == 0 && order <= MLSPEC_HADAMARD_MAX_ORDER, op, ": matrix has ", order,
                      " rows, expected a multiple of 4 up to ", int64_t(MLSPEC_HADAMARD_MAX_ORDER));
  }
  const int64_t powers = size / order;
  TORCH_CHECK_VALUE(size > 0 && size % order == 0 && (powers & (powers - 1)) == 0, op, ": size is ", size, ", expected ", order,
                    " times a power of two");
  TORCH_CHECK_VALUE(inner > 0 && width % (size * inner) == 0, op, ": x has ", width, " columns, size ", size, " times inner ", inner,
                    " does not divide them");
  return {matrix ? matrix->const_data_ptr<float>() : nullptr, order, size, inner};
}

}  // namespace mlspec
