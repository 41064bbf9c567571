// `Vec` of pack_rows_order.h with AVX-512: included by the files of the sets that have it, after their target pragma.

struct Vec512 {
  static constexpr int kLanes = 16;
  using Int = __m512i;
  static __m512i rounded(const float* x) {  // bfloat16 in the upper half of each lane
    const __m512 value = _mm512_loadu_ps(x);
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000));
  }
  static __m512i rounded_pairs(const float* x) {  // 32 bfloat16
    const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                                  29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_epi16(rounded(x), upper_halves, rounded(x + 16));
  }
  static void round_bfloat16(const float* x, uint16_t* out) { _mm512_storeu_si512(out, rounded_pairs(x)); }
  static Int magnitude(const float* x) {
    return _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x)), _mm512_set1_epi32(0x7FFFFFFF));
  }
  static Int scaled(const float* x, float inverse) {  // what is no number becomes 0x80000000
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse)));
  }
  static Int max(Int a, Int b) { return _mm512_max_epi32(a, b); }
  static Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int within(Int a, int32_t bound) {
    return _mm512_min_epi32(_mm512_max_epi32(a, _mm512_set1_epi32(-bound)), _mm512_set1_epi32(bound));
  }
  static void store(Int a, int32_t* out) { _mm512_storeu_si512(out, a); }
  static void store_codes(Int a, int8_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(a));
  }
  template <Int (*Op)(Int, Int)>
  static Int halve(Int a, Int b) {  // each 128 bits: a01 a23 b01 b23
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return Op(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xDD)));
  }
  template <Int (*Op)(Int, Int)>
  static Int halve_quarters(Int a, Int b) {
    return Op(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  }
  template <Int (*Op)(Int, Int)>
  static Int reduce_four(const Int* a) {
    return halve<Op>(halve<Op>(a[0], a[1]), halve<Op>(a[2], a[3]));
  }
  template <Int (*Op)(Int, Int)>
  static Int reduce(const Int* a) {
    const Int low = halve_quarters<Op>(reduce_four<Op>(a), reduce_four<Op>(a + 4));
    return halve_quarters<Op>(low, halve_quarters<Op>(reduce_four<Op>(a + 8), reduce_four<Op>(a + 12)));
  }
  static Int reduce_max(const Int* a) { return reduce<max>(a); }
  static Int reduce_add(const Int* a) { return reduce<add>(a); }
};
