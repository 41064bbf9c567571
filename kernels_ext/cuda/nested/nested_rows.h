// What does the kernel take that reads rows of a nested BF16 weight? As in rows.h.
#pragma once

#include "../rows/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *tiles, *low_tiles;  // as linear.h has them
  const int32_t* exponent_shift;
  int64_t rows, width;  // width: a multiple of 32
} mlspec_cuda_nested_table;

// ids int32 [n], clamped to the table's rows -> out bfloat16 [n, width], the exact values times scale, rounded once.
const char* mlspec_cuda_nested_rows(const mlspec_cuda_nested_table* table, const int32_t* ids, int64_t n, float scale, void* out,
                                    const mlspec_cuda_row_launch* how);

#ifdef __cplusplus
}
#endif
