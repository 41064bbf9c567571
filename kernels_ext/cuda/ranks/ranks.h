// What do the kernels take that add up, or bring together, what GPUs computed which share a model? Plain C: every call only enqueues
// work. Each GPU has a box, into which all others write; boxes hold kExchangeLines lines for each sender, twice.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { kMostRanks = 8, kExchangeLines = 1 << 18, kLineBytes = 16, kLineElements = 4 };

// boxes: of all ranks, in their order, where this GPU reaches them; zeros before the first call. state: int32 [2] of this GPU, zeros before
// the first call. All ranks make the same calls in the same order, one at a time.
typedef struct {
  void* boxes[kMostRanks];
  int32_t* state;
  int32_t count, index;
} mlspec_cuda_ranks;

// Bytes of a box of `count` ranks.
int64_t mlspec_cuda_box_bytes(int32_t count);

// Each returns null, or what went wrong. x and y: bfloat16, dense, at multiples of 8 bytes; elements a multiple of 4. A GPU that is waited
// for longer than 25 seconds ends the wait with a device error.

// y [elements]: the sum over all ranks of x, in float32, in their order.
const char* mlspec_cuda_sum_ranks(const mlspec_cuda_ranks* ranks, const void* x, int64_t elements, void* y, void* stream, int32_t overlap);

// y [rows, count * width]: x [rows, width] of all ranks side by side; width a multiple of 4.
const char* mlspec_cuda_gather_ranks(const mlspec_cuda_ranks* ranks, const void* x, int64_t rows, int64_t width, void* y, void* stream,
                                     int32_t overlap);

#ifdef __cplusplus
}
#endif
