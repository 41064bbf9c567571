// What does the kernel take that reads rows of an embedding whose codes lie in planes and places? As in rows.h; what they mean:
// hf_mlspec/formats/zipper/rows.py.
#pragma once

#include "../rows/rows.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const uint8_t* planes;  // [rows][count][width / 8]
  const void* step;       // float16 [rows]
  const int32_t* begins;  // [rows + 1], of bytes of `places`; null: the second bit of a code has a plane
  const uint8_t* places;
  int64_t rows, width;  // width: a multiple of 32
  int32_t count;        // of planes
  int32_t lowest;       // bits below them, all 0
} mlspec_cuda_zipper_table;

// ids int32 [n], clamped to the table's rows -> out bfloat16 [n, width]: code times step, rounded; where scale is not 1 times scale,
// rounded once more.
const char* mlspec_cuda_zipper_rows(const mlspec_cuda_zipper_table* table, const int32_t* ids, int64_t n, float scale, void* out,
                                    const mlspec_cuda_row_launch* how);

#ifdef __cplusplus
}
#endif
