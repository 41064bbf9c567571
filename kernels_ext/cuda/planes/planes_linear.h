// What do the linear kernels of bit-planes take? mlspec_cuda_linear: tiles, tile_stride, num_planes, zero_doubled, group_size.
#pragma once

#include "../linear/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// activation_bits 16; tile_stride: 128 / group_size * 128 bytes of scales and 1024 for each of 1 to 8 stored planes, of
// which the first num_planes are multiplied. zero_doubled: 0 to 256, of 8 stored planes 254 to 256, so that weights are
// exact in bfloat16. Planes behind those of the tiles may lie in arrays of their own, num_apart. Compute capability 9.0; the portable one, in the same tiles, since 8.0.
const char* mlspec_cuda_bitplane_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_portable_bitplane_linear(const mlspec_cuda_linear* args);

// The same of as many planes as args->widths says, 1 to num_planes. Compute capability 9.0.
const char* mlspec_cuda_bitplane_chosen(const mlspec_cuda_linear* args);

#ifdef __cplusplus
}
#endif
