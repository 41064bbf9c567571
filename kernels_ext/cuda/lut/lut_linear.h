// What do the linear kernels of lookup-table planes take? mlspec_cuda_linear: tiles, tile_stride, num_planes, tables, table_columns.
#pragma once

#include "../linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// activation_bits 16; tile_stride: 1024 bytes for each of 1 to 8 stored planes, of which the first num_planes are read, and 16
// for each block of 32 inputs that the last tile lacks. Compute capability 9.0; the portable one, in the same tiles, since 8.0.
const char* mlspec_cuda_lut_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_portable_lut_linear(const mlspec_cuda_linear* args);

#ifdef __cplusplus
}
#endif
