// One row of a nested weight as bfloat16, for tables that are looked up: plain C++, a row of a step at a time.
#include <cstdint>

#include "../kernels.h"

namespace {

#include "nested_field.h"

}  // namespace

extern "C" void mlspec_nested_row(const mlspec_linear_args* args, int64_t row, uint16_t* to) {
  const int64_t steps = args->in_features / 32, first = row / 16 * steps;
  const int r = static_cast<int>(row % 16);
  const uint8_t* const nibbles = static_cast<const uint8_t*>(args->weight) + first * 256;
  const uint8_t* const exponents = static_cast<const uint8_t*>(args->scale) + first * 16;
  const uint8_t* const low = args->low + first * 768;
  for (int64_t b = 0; b < steps; ++b)
    for (int i = 0; i < 32; ++i)
      to[32 * b + i] = static_cast<uint16_t>(nested_weight(nibbles + 256 * b, exponents + 16 * b, low + 768 * b, i, r));
}
