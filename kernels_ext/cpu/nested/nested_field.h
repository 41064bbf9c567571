// What is one weight of a nested tile? The plainest statement of the layout in kernels.h, element by element.
//
// Included inside the anonymous namespaces of nested_{linear_generic,rows}.cpp.

// The field v of element 8 j + 2 p + h of output r: bits 0..11 of a word, or the top nibbles of three. low: of the step.
inline uint32_t nested_field(const uint8_t* low, int j, int p, int r, int h) {
  const auto word = [&](int k) {
    const uint8_t* bytes = low + 192 * j + 64 * k + 4 * r + 2 * h;
    return static_cast<uint32_t>(bytes[0] | bytes[1] << 8);
  };
  if (p == 1) return word(0) >> 12 | (word(1) >> 12) << 4 | (word(2) >> 12) << 8;
  return word(p == 0 ? 0 : p - 1) & 0x0FFF;
}

// Element 0..31 of output r of a step, as bfloat16.
inline uint32_t nested_weight(const uint8_t* nibbles, const uint8_t* exponents, const uint8_t* low, int element, int r) {
  const int j = element / 8, i = element % 8;
  const uint32_t nibble = nibbles[64 * j + 4 * r + i % 4] >> (i < 4 ? 0 : 4), v = nested_field(low, j, i / 2, r, i % 2);
  const uint32_t magnitude = v == 0 ? 0 : v + ((exponents[r] - 31u) << 7);
  return magnitude | (nibble & 8) << 12;
}
