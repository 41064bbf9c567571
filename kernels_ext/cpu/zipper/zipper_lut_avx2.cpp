// Sparse high parts with AVX2: one row gathers eight inputs at a time, more rows are lanes (zipper_lanes.h).
#include <immintrin.h>

#include "../target.h"

MLSPEC_TARGET("avx2,fma")

#include "zipper_lanes.h"

namespace {

void add_row(const mlspec_zipper_args& a, int64_t row, int64_t slice_begin, int64_t slice_end) {
  const int64_t across = cells_across(a);
  alignas(32) float x[kInputs], own[kOutputs];
  for (int64_t slice = slice_begin; slice < slice_end; ++slice) {
    __m256 sums[kOutputs / 8];
    for (__m256& sum : sums) sum = _mm256_setzero_ps();
    const int32_t* const starts = a.starts + slice * across;
    for (int64_t cell = 0; cell < across; ++cell) {
      if (starts[cell] == starts[cell + 1]) continue;
      const int64_t at = cell * kInputs, inputs = a.in_features - at < kInputs ? a.in_features - at : kInputs;
      for (int64_t i = 0; i < inputs; ++i) x[i] = widened(a.x[row * a.x_stride + at + i]);
      const int16_t* words = a.words + static_cast<int64_t>(starts[cell]) * kOutputs;
      for (int32_t slot = starts[cell]; slot < starts[cell + 1]; ++slot)
        for (__m256& sum : sums) {
          const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words));
          words += 8;
          if (_mm_testz_si128(narrow, narrow)) continue;  // no value in these lanes, of which there are many
          const __m256i eight = _mm256_cvtepi16_epi32(narrow);
          const __m256 found = _mm256_i32gather_ps(x, _mm256_and_si256(eight, _mm256_set1_epi32(kInputs - 1)), 4);
          sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(eight, 8)), found, sum);
        }
    }
    for (int i = 0; i < kOutputs / 8; ++i) _mm256_store_ps(own + 8 * i, sums[i]);
    end_of_slice(a, row, slice, own, 1);
  }
}

}  // namespace

extern "C" void mlspec_zipper_lut_avx2(const mlspec_zipper_args* args, int64_t slice_begin, int64_t slice_end) {
  for (int64_t row = 0; row < args->rows; row += kRows) {
    const int64_t rows = args->rows - row < kRows ? args->rows - row : kRows;
    if (rows == 1) add_row(*args, row, slice_begin, slice_end);
    else add_rows(*args, row, rows, slice_begin, slice_end);
  }
}

MLSPEC_TARGET_END
