// Where are the numbers of a sparse high part in its one tensor? As hf_mlspec/ops/zipper.py puts them there, for any device.
#pragma once
#include <cstdint>

namespace mlspec {

struct ZipperPlaces {
  static constexpr int64_t kOutputs = 32, kInputs = 64;            // of a cell (hf_mlspec/formats/zipper/sparse.py)
  static constexpr int64_t wide = 4, step = wide + 1, kLine = 16;  // behind the four integers of a weight on disk
  int64_t down, across, cells, starts, words;
  ZipperPlaces(int64_t in, int64_t out)
      : down((out + kOutputs - 1) / kOutputs), across((in + kInputs - 1) / kInputs), cells(down * across), starts(step + out),
        words((starts + cells + 1 + kLine - 1) / kLine * kLine) {}
};

}  // namespace mlspec
