// What do adapters add to linears, as the bindings take it: in a kernel of its own, or in that of the linear?
#pragma once

#include "device.h"

namespace mlspec {

// TypeError, ValueError for what does not fit y, or its outputs, of `n` rows: between float32 [n, ranks], up float32
// [rank, outputs], first int32 [outputs], on the device of `x`.
void check_low_rank(const char* op, const at::Tensor& between, const at::Tensor& up, const at::Tensor& first, int64_t n, int64_t outputs,
                    const char* x_name, const at::Tensor& x);

// y bfloat16 [n, outputs] and what was checked -> the sum, rounded once.
at::Tensor with_low_rank(const CudaCall& call, const at::Tensor& y, const at::Tensor& between, const at::Tensor& up,
                         const at::Tensor& first);

}  // namespace mlspec
