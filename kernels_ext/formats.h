// Which bits do the kernels read? The tables of hf_mlspec/formats/mxfp4.py in C, checked against the same numbers.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace mlspec {

constexpr int kBlock = 32;                  // elements that share one E8M0 scale byte
constexpr int kBlockBytes = kBlock / 2;     // low nibble first: byte i = code 2i | code 2i+1 << 4
constexpr float kE2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
static_assert(kE2M1[1] == 0.5f && kE2M1[7] == 6.0f && kE2M1[15] == -6.0f, "E2M1, OCP MX v1.0 table 5");

constexpr uint32_t e8m0_bits(uint32_t code) {  // float32 bits of 2^(code - 127): 0 is a subnormal, 255 is NaN
  return code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23;
}
static_assert(e8m0_bits(127) == 0x3F800000u, "code 127 is 1.0");

struct E8M0Values {
  float value[256];
};
inline constexpr E8M0Values kE8M0 = [] {
  E8M0Values table{};
  for (uint32_t code = 0; code < 256; ++code) table.value[code] = std::bit_cast<float>(e8m0_bits(code));
  return table;
}();
static_assert(kE8M0.value[126] == 0.5f && kE8M0.value[128] == 2.0f, "E8M0 is a biased exponent");

}  // namespace mlspec
