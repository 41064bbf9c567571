// What is a row of an embedding whose codes lie in planes and places? Plain C++, alike on every instruction set; what they mean:
// hf_mlspec/formats/zipper/rows.py.
#pragma once
#include <cstdint>

#include "../kernels.h"

namespace mlspec {

struct ZipperTable {
  const uint8_t* planes = nullptr;  // [rows][count][width / 8]
  const uint16_t* step = nullptr;   // float16 [rows]
  const int32_t* begins = nullptr;  // [rows + 1], of bytes of `places`; null: the second bit of a code has a plane
  const uint8_t* places = nullptr;
  int64_t rows = 0, width = 0;
  int32_t count = 0;   // of planes
  int32_t lowest = 0;  // bits below them, all 0
};

constexpr int64_t kPlacesTogether = 128;  // inputs whose places are counted by one byte

// The values of row `id`, which is inside of the table, exactly: code times step. row: float [width].
inline void zipper_row(const ZipperTable& table, int64_t id, float* row) {
  const int64_t bytes = table.width / 8;
  const uint8_t* const planes = table.planes + id * table.count * bytes;
  float step;
  cpu_kernels().row.widen(table.step + id, MLSPEC_FLOAT16, 1.0f, 1, &step);
  const bool sparse = table.begins;
  const int32_t top = table.count + table.lowest + sparse - 1, second = 1 << (top - 1);  // bits of a code: top + 1
  for (int64_t j = 0; j < bytes; ++j) {
    int32_t codes[8];
    for (int i = 0; i < 8; ++i) codes[i] = planes[j] >> i & 1 ? 0 : -(1 << top);
    if (sparse)  // where nothing else is said it is the sign's
      for (int i = 0; i < 8; ++i) codes[i] += planes[j] >> i & 1 ? 0 : second;
    for (int32_t p = 1; p < table.count; ++p) {
      const int shift = table.count - 1 - p + table.lowest;
      const uint8_t plane = planes[p * bytes + j];
      for (int i = 0; i < 8; ++i) codes[i] += (plane >> i & 1) << shift;
    }
    for (int i = 0; i < 8; ++i) row[8 * j + i] = static_cast<float>(codes[i]) * step;
  }
  if (!sparse) return;
  const int64_t groups = (table.width + kPlacesTogether - 1) / kPlacesTogether;
  const uint8_t* const counts = table.places + table.begins[id];
  const uint8_t* place = counts + groups;
  const float more = static_cast<float>(second) * step;
  for (int64_t g = 0; g < groups; ++g)
    for (int n = 0; n < counts[g]; ++n, ++place) {
      float& value = row[g * kPlacesTogether + *place];
      value += value < 0 ? -more : more;  // a code whose second bit is not its sign's: away from 0
    }
}

}  // namespace mlspec
