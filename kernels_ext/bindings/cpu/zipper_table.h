// Where does a table of codes lie that the CPU reads?
#pragma once
#include "../zipper_table.h"
#include "../../cpu/zipper/zipper_rows.h"

namespace mlspec {

inline ZipperTable table_of_codes(const CodeRows& sizes, const at::Tensor& planes, const at::Tensor& step, const at::Tensor& places,
                                  int64_t lowest) {
  ZipperTable table;
  table.planes = planes.const_data_ptr<uint8_t>();
  table.step = static_cast<const uint16_t*>(step.const_data_ptr());
  table.begins = sizes.sparse ? places.const_data_ptr<int32_t>() : nullptr;
  table.places = sizes.sparse ? reinterpret_cast<const uint8_t*>(table.begins + sizes.rows + 1) : nullptr;
  table.rows = sizes.rows, table.width = sizes.width;
  table.count = static_cast<int32_t>(sizes.count), table.lowest = static_cast<int32_t>(lowest);
  return table;
}

}  // namespace mlspec
