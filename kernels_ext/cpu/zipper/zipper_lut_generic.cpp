// Sparse high parts without intrinsics: any processor.
#include "zipper_lanes.h"

extern "C" void mlspec_zipper_lut_generic(const mlspec_zipper_args* args, int64_t slice_begin, int64_t slice_end) {
  for (int64_t row = 0; row < args->rows; row += kRows)
    add_rows(*args, row, args->rows - row < kRows ? args->rows - row : kRows, slice_begin, slice_end);
}
