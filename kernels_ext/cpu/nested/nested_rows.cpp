// One row of a nested weight as bfloat16, for tables that are looked up: plain C++, a row of a step at a time.
#include <cstdint>

#include "../kernels.h"

namespace {

using mlspec::kBlock;
using namespace mlspec::cpu_tiles;

#include "nested_field.h"

}  // namespace

extern "C" void mlspec_nested_row(const mlspec_linear_args* args, int64_t row, uint16_t* to) {
  const int64_t steps = args->in_features / kBlock, first = row / kTileOutputs * steps;
  const int r = static_cast<int>(row % kTileOutputs);
  const uint8_t* const nibbles = static_cast<const uint8_t*>(args->weight) + first * kTileBytes;
  const uint8_t* const exponents = static_cast<const uint8_t*>(args->scale) + first * kTileOutputs;
  const uint8_t* const low = args->low + first * kLowTileBytes;
  for (int64_t b = 0; b < steps; ++b)
    for (int i = 0; i < kBlock; ++i)
      to[kBlock * b + i] = static_cast<uint16_t>(
          nested_weight(nibbles + kTileBytes * b, exponents + kTileOutputs * b, low + kLowTileBytes * b, i, r));
}
