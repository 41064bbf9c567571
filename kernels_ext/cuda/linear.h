// What do the linear kernels take? Plain C: every pointer is device memory, every call only enqueues work on `stream`.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void* tiles;     // from a prepack function of the same format
  const void* x;         // bfloat16 [tokens, in]; int8_activations: codes in the order of linear_formats.cuh
  const float* x_scales; // int8_activations: float32 [ceil(in / 128) * 128 / group, x_scale_stride], zeros beyond `in`
  const void* bias;      // bfloat16 [out] or null
  void* out;             // bfloat16 [tokens, out]
  int64_t num_tokens, in_features, out_features;
  int64_t x_scale_stride;  // tokens, a multiple of 4
  int32_t group_size, has_zeros, int8_activations;  // int4
  int32_t exponent_shift;  // MXFP4: of prepack, the result is multiplied by 2^exponent_shift
  int32_t overlap;         // may start before the kernel in front of it in the stream ends; only its weights are read then
  // For tests and timing; 0: chosen from the shapes. Bits depend on `ranks` alone.
  int32_t variant;         // see launch_variant
  int32_t ranks;           // blocks that share a tile's inputs: 1 to 8
  int32_t ring_bytes;      // of stages in shared memory
  int32_t stages_ahead;    // whose weights are asked for before the kernel in front ends
  void* stream;
} mlspec_cuda_linear;

// Each returns null, or what went wrong.
const char* mlspec_cuda_bf16_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_int4_linear(const mlspec_cuda_linear* args);
const char* mlspec_cuda_mxfp4_linear(const mlspec_cuda_linear* args);

typedef struct {
  void* weight;  // as saved: bfloat16 [out, in] or packed codes uint8 [out, in / 2]
  void* scale;   // int4 float16 [out, in / group], MXFP4 uint8 [out, in / 32]
  void* zero;    // uint8 as scale, or null
  void* tiles;
  int64_t in_features, out_features;
  int32_t group_size;      // 0: bfloat16; 32 with exponent_shift: MXFP4
  int32_t exponent_shift;  // max(0, largest scale byte - 128)
  int32_t mxfp4;
  void* stream;
} mlspec_cuda_prepack;

int64_t mlspec_cuda_tile_bytes(const mlspec_cuda_prepack* args);  // of all tiles
const char* mlspec_cuda_prepack_tiles(const mlspec_cuda_prepack* args);
const char* mlspec_cuda_unprepack_tiles(const mlspec_cuda_prepack* args);

#ifdef __cplusplus
}
#endif
