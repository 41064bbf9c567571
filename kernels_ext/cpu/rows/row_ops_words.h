// Which word is a float, and which float is a word? Included inside the anonymous namespace of row_ops_<isa>.cpp.
#pragma once

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
