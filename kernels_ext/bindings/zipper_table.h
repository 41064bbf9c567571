// Which operands is an embedding in two parts? As hf_mlspec/formats/zipper/rows.py makes them, for any device. Planes and places are
// trusted: nothing of them is read here.
#pragma once
#include <cmath>

#include "operands.h"

namespace mlspec {

struct CodeRows {
  int64_t rows, count, width;  // count: of planes
  bool sparse;                 // whether `places` says where the second bit of a code is not its sign's
};

inline CodeRows checked_table(const char* op, const at::Tensor& planes, const at::Tensor& step, const at::Tensor& places,
                              int64_t lowest) {
  check_dtype(op, "planes", planes, at::kByte);
  check_contiguous(op, "planes", planes);
  TORCH_CHECK_VALUE(planes.dim() == 3 && planes.size(0) > 0 && planes.size(1) > 0 && planes.size(2) % 4 == 0, op,
                    ": planes has shape ", planes.sizes(), ", expected [rows, planes, in / 8], a row or more, in a multiple of 32");
  const CodeRows found{planes.size(0), planes.size(1), planes.size(2) * 8, places.numel() > 0};
  check_dtype(op, "step", step, at::kHalf);
  check_shape(op, "step", step, {found.rows, 1});
  check_contiguous(op, "step", step);
  check_dtype(op, "places", places, at::kInt);
  check_contiguous(op, "places", places);
  TORCH_CHECK_VALUE(places.dim() == 1 && (!found.sparse || places.size(0) > found.rows), op, ": places has shape ", places.sizes(),
                    ", expected [0] or [", found.rows + 1, " + places]");
  const int64_t bits = found.count + lowest + found.sparse;
  TORCH_CHECK_VALUE(lowest >= 0 && bits >= 2 && bits <= 8, op, ": lowest is ", lowest, " and there are ", found.count,
                    " planes, codes have 2 to 8 bits");
  return found;
}

inline CodeRows checked_code_rows(const char* op, const at::Tensor& ids, const at::Tensor& planes, const at::Tensor& step,
                                  const at::Tensor& places, int64_t lowest, double scale) {
  check_dtype(op, "ids", ids, at::kInt);
  TORCH_CHECK_VALUE(ids.dim() == 1, op, ": ids has shape ", ids.sizes(), ", expected [n]");
  check_contiguous(op, "ids", ids);
  TORCH_CHECK_VALUE(std::isfinite(scale), op, ": scale is ", scale, ", expected a finite number (1.0: the rows as they are)");
  return checked_table(op, planes, step, places, lowest);
}

}  // namespace mlspec
