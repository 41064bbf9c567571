// How do planes become bfloat16, two neighbours of in_features in each 32-bit lane? As vdpbf16ps and AMX tiles take them.
//
// Included inside the anonymous namespaces of planes_linear_{avx512bf16,amx}.cpp after bitplane_linear_nibbles.h.

// One part of the planes (planes_linear_codes.h). vpermw looks 5 bits up: what lies above a code's bits changes nothing.
struct UnpackPairs {
  __m512i table;
  int64_t first_byte, plane_bytes;
  int planes;

  UnpackPairs(const mlspec_linear_args& a, int part)
      : first_byte(part * kNibblePlanes * a.plane_bytes), plane_bytes(a.plane_bytes), planes(planes_of_part(a, part)) {
    alignas(64) uint16_t values[32];
    for (int i = 0; i < 32; ++i) {
      const float value = part_value(a, part, i & ((1 << planes) - 1));  // a bfloat16, says the binding
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      values[i] = static_cast<uint16_t>(bits >> 16);
    }
    table = _mm512_load_si512(values);
  }

  // use(p, pair): elements 2 p and 2 p + 1 of 16 outputs.
  template <class Use>
  __attribute__((always_inline)) void pairs(const uint8_t* block, Use use) const {
    __m512i codes[4];
    const __m512i table = this->table;  // a copy, which no store into the pairs can change
    nibbles<Zmm>(block + first_byte, plane_bytes, planes, codes);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      use(s, _mm512_permutexvar_epi16(codes[s], table));
      use(4 + s, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes[s], 4), table));
      use(8 + s, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes[s], 8), table));
      use(12 + s, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes[s], 12), table));
    }
  }
};
