// How do AVX-512 registers become BF16 weights again? One step of a nested tile (kernels.h) as operands of vdpbf16ps.
//
// Included inside the anonymous namespaces of nested_linear_{avx512vnni,avx512bf16,amx}.cpp.

struct Rebuild {
  const __m512i field = _mm512_set1_epi16(0x0FFF), sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
  const __m512i middle = _mm512_set1_epi16(0x00F0), upper = _mm512_set1_epi16(0x0F00), least = _mm512_set1_epi16(31);
  // Bytes 0 1 2 3 of an output in the order 0 2 1 3: words whose nibbles belong to elements (0, 4, 2, 6) and (1, 5, 3, 7).
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));

  Rebuild() {}  // not constexpr: GCC would evaluate that outside of the target

  static __m512i or_masked(__m512i a, __m512i b, __m512i mask) { return _mm512_ternarylogic_epi32(a, b, mask, 0xF8); }

  // v == 0 ? 0 : v + base, and the top bit of `signs`.
  __m512i join(__m512i v, __m512i base, __m512i signs) const {
    return or_masked(_mm512_mask_add_epi16(v, _mm512_test_epi16_mask(v, v), v, base), signs, sign);
  }

  __m512i base_of(const uint8_t* exponents) const {
    const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)exponents));
    return _mm512_slli_epi16(_mm512_sub_epi16(_mm512_or_si512(low, _mm512_slli_epi32(low, 16)), least), 7);
  }

  inline __attribute__((always_inline)) void operator()(const uint8_t* nibbles, const uint8_t* exponents, const uint8_t* low,
                                                        uint32_t (*pairs)[16]) const {
    const __m512i base = base_of(exponents);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i signs = _mm512_shuffle_epi8(_mm512_loadu_si512(nibbles + 64 * j), order);
      const __m512i a = _mm512_loadu_si512(low + 192 * j), b = _mm512_loadu_si512(low + 192 * j + 64);
      const __m512i c = _mm512_loadu_si512(low + 192 * j + 128);
      const __m512i two = or_masked(_mm512_srli_epi16(a, 12), _mm512_srli_epi16(b, 8), middle);
      const __m512i split = or_masked(two, _mm512_srli_epi16(c, 4), upper);
      const __m512i whole[3] = {_mm512_and_si512(a, field), _mm512_and_si512(b, field), _mm512_and_si512(c, field)};
      _mm512_store_si512(pairs[4 * j], join(whole[0], base, _mm512_slli_epi16(signs, 12)));
      _mm512_store_si512(pairs[4 * j + 1], join(split, base, _mm512_slli_epi16(signs, 4)));
      _mm512_store_si512(pairs[4 * j + 2], join(whole[1], base, _mm512_slli_epi16(signs, 8)));
      _mm512_store_si512(pairs[4 * j + 3], join(whole[2], base, signs));
    }
  }
};
