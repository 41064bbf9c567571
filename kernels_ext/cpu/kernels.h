// What can the CPU kernels do? Plain C signatures, no torch: the bindings check operands and split work over threads.
#pragma once
#include <cstdint>

extern "C" {

// Output features that a thread takes at a time: a whole number of tiles of 1, 2 or 4 rows.
enum { MLSPEC_FEATURE_GROUP = 8 };

enum mlspec_dtype { MLSPEC_FLOAT32 = 0, MLSPEC_BFLOAT16 = 1, MLSPEC_FLOAT16 = 2 };

// y[n][out] = x[n][in] * W[out][in]^T + bias, W in MXFP4, sums in float32.
struct mlspec_mxfp4_linear_args {
  const uint8_t* weight_packed;  // [out][in / 2], low nibble first
  const uint8_t* weight_scale;   // [out][in / 32], E8M0
  const float* split_x;          // [n][in / 32][even: 16 | odd: 16], written by split_x below
  const float* bias;             // [out] or null
  void* y;                       // [n][out]
  int64_t in_features, out_features, num_rows;
  mlspec_dtype y_dtype;
};

// The order of every sum is fixed by in_features: lane l adds, block after block, elements 2l then 2l+1; the 16 lanes
// are then halved four times. Neither the other rows, nor the tile of the row, nor the thread count changes a bit.
#define MLSPEC_DECLARE(isa)                                                                                        \
  /* x rows [row_begin, row_end) -> float32, even and odd elements of each block apart */                          \
  void mlspec_split_x_##isa(const void* x, mlspec_dtype dtype, int64_t in_features, int64_t row_begin,             \
                            int64_t row_end, float* split_x);                                                      \
  /* output features [out_begin, out_end) of every row */                                                          \
  void mlspec_mxfp4_linear_##isa(const mlspec_mxfp4_linear_args* args, int64_t out_begin, int64_t out_end);

MLSPEC_DECLARE(generic)
#if defined(__x86_64__)
MLSPEC_DECLARE(avx2)
MLSPEC_DECLARE(avx512)
#endif
#undef MLSPEC_DECLARE

}  // extern "C"
