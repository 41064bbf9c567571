// Which linear kernels run on every GPU since compute capability 8.0? Those of linear.h under other names: the same arguments
// and tiles, bits of their own. `variant`, `ranks`, `ring_bytes` and `stages_ahead` are not read.
#pragma once

#include "../linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// in_features of any size and weights and x of any alignment: slower where rows are no multiple of 16 bytes.
const char* mlspec_cuda_portable_bf16_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_portable_int4_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_portable_mxfp4_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_portable_nested_linear(const mlspec_cuda_linear* args);

#ifdef __cplusplus
}
#endif
