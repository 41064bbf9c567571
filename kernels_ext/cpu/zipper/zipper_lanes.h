// What do instruction sets without a table of 64 entries in registers share? Inputs of a cell as floats, and up to eight rows of x at a
// time. Included by one file an instruction set, whose compiler makes vectors of the loops over lanes.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../kernels.h"

namespace {

constexpr int kOutputs = MLSPEC_ZIPPER_OUTPUTS, kInputs = MLSPEC_ZIPPER_INPUTS, kRows = 8;
constexpr int kSlicesAtOnce = 16;  // share the widened inputs; their sums fit the first cache

inline int64_t cells_across(const mlspec_zipper_args& a) { return (a.in_features + kInputs - 1) / kInputs; }

inline float widened(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// y += step * sums of outputs [slice * 32, ...) of one row, `apart` floats from one output to the next.
inline void end_of_slice(const mlspec_zipper_args& a, int64_t row, int64_t slice, const float* sums, int apart) {
  const int64_t first = slice * kOutputs, left = a.out_features - first;
  float* const y = a.y + row * a.y_stride + first;
  for (int64_t i = 0; i < (left < kOutputs ? left : kOutputs); ++i) y[i] = std::fma(a.step[first + i], sums[i * apart], y[i]);
}

// Rows [first, first + rows) of up to eight. Products are exact, so that a compiler that fuses them with the sums changes no bit.
inline void add_rows(const mlspec_zipper_args& a, int64_t first, int64_t rows, int64_t slice_begin, int64_t slice_end) {
  const int64_t across = cells_across(a);
  alignas(64) float sums[kSlicesAtOnce][kOutputs][kRows];
  alignas(64) float x[kInputs][kRows] = {};
  for (int64_t begin = slice_begin; begin < slice_end; begin += kSlicesAtOnce) {
    const int64_t count = slice_end - begin < kSlicesAtOnce ? slice_end - begin : kSlicesAtOnce;
    std::memset(sums, 0, sizeof(sums[0]) * static_cast<size_t>(count));
    for (int64_t cell = 0; cell < across; ++cell) {
      const int64_t at = cell * kInputs, inputs = a.in_features - at < kInputs ? a.in_features - at : kInputs;
      for (int64_t row = 0; row < rows; ++row) {
        const uint16_t* const from = a.x + (first + row) * a.x_stride + at;
        for (int64_t i = 0; i < inputs; ++i) x[i][row] = widened(from[i]);
      }
      for (int64_t slice = 0; slice < count; ++slice) {
        const int32_t* const starts = a.starts + (begin + slice) * across + cell;
        const int16_t* words = a.words + static_cast<int64_t>(starts[0]) * kOutputs;
        for (int32_t slot = starts[0]; slot < starts[1]; ++slot, words += kOutputs)
          for (int lane = 0; lane < kOutputs; ++lane) {
            const float times = static_cast<float>(words[lane] >> 8);
            const float* const own = x[words[lane] & (kInputs - 1)];
            float* const to = sums[slice][lane];
            for (int row = 0; row < kRows; ++row) to[row] += times * own[row];
          }
      }
    }
    for (int64_t slice = 0; slice < count; ++slice)
      for (int64_t row = 0; row < rows; ++row) end_of_slice(a, first + row, begin + slice, &sums[slice][0][row], kRows);
  }
}

}  // namespace
