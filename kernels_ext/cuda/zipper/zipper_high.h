// What does the kernel of sparse high parts take? As in rows.h.
#pragma once

#include "../rows/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MLSPEC_CUDA_ZIPPER_SEGMENTS 3

// The sparse cells of one weight (hf_mlspec/formats/zipper/sparse.py), packed: its outputs are first_output and on.
typedef struct {
  int64_t first_output, outputs;
  const int32_t* wide;    // one number: 0, or 1 where a word is one value
  const float* step;      // [outputs]
  const int32_t* starts;  // [slices of 32 outputs * cells of 64 inputs + 1], in words
  const int32_t* words;
} mlspec_cuda_zipper_cells;

typedef struct {
  const void* x;     // bfloat16 [tokens, in], aligned to 16 bytes
  const float* low;  // [tokens, out]
  const void* bias;  // [out] float32 or bfloat16, or null
  void* y;           // [tokens, out] = low + sums * step + bias, bfloat16 or float32
  int64_t num_tokens, in_features, out_features;
  mlspec_cuda_zipper_cells segments[MLSPEC_CUDA_ZIPPER_SEGMENTS];
  int32_t num_segments, bias_is_float32, y_is_float32;
} mlspec_cuda_zipper_high;

// in_features: a multiple of 32. A token's bits do not depend on the others.
const char* mlspec_cuda_zipper_high_linear(const mlspec_cuda_zipper_high* high, const mlspec_cuda_row_launch* how);

#ifdef __cplusplus
}
#endif
