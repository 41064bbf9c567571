// What are sixteen floats with AVX2, FMA and F16C? Two registers.
//
// Included inside the anonymous namespaces of {row_ops,attention}_avx2.cpp.

constexpr int kLanes = 16;

struct Mask {
  __m256 low, high;
};

// All ones in the lanes i with begin <= i < end.
inline __m256i lanes_of_eight(int64_t begin, int64_t end) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i from = _mm256_set1_epi32(static_cast<int>(std::clamp<int64_t>(begin, 0, 8)) - 1);
  const __m256i to = _mm256_set1_epi32(static_cast<int>(std::clamp<int64_t>(end, 0, 8)));
  return _mm256_and_si256(_mm256_cmpgt_epi32(index, from), _mm256_cmpgt_epi32(to, index));
}

inline __m128i to_bfloat16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), lowest), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}

inline __m128i load_half(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void store_half(uint16_t* p, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
inline __m256 from_bfloat16(__m128i v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

struct Vec {
  __m256 low, high;  // lanes 0..7 and 8..15
  static constexpr int kTile = 2;  // rows, and Vecs of a row, of a tile of products: 8 sums and 4 factors of 16 registers
  static Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec load_first(const float* p, int n) {
    const __m256 low = _mm256_maskload_ps(p, lanes_of_eight(0, n));
    return {low, n > 8 ? _mm256_maskload_ps(p + 8, lanes_of_eight(0, n - 8)) : _mm256_setzero_ps()};
  }
  static Vec load_bfloat16(const uint16_t* p) { return {from_bfloat16(load_half(p)), from_bfloat16(load_half(p + 8))}; }
  static Vec load_float16(const uint16_t* p) { return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))}; }
  static Vec load_int8(const int8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
  }
  // to: what `table` holds for 32 nibbles, the lower one of a byte first
  static void look_up_nibbles(Vec table, const uint8_t* p, Vec (&to)[2]) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), four = _mm_set1_epi8(15);
    const __m128i even = _mm_and_si128(bytes, four), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), four);
    const auto eight = [&](__m128i codes) {
      const __m256i index = _mm256_cvtepu8_epi32(codes);  // a permutation looks at its lowest three bits
      const __m256 below = _mm256_permutevar8x32_ps(table.low, index), above = _mm256_permutevar8x32_ps(table.high, index);
      return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    };
    const __m128i first = _mm_unpacklo_epi8(even, odd), second = _mm_unpackhi_epi8(even, odd);
    to[0] = {eight(first), eight(_mm_srli_si128(first, 8))};
    to[1] = {eight(second), eight(_mm_srli_si128(second, 8))};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, low);
    _mm256_storeu_ps(p + 8, high);
  }
  void store_first(float* p, int n) const {
    _mm256_maskstore_ps(p, lanes_of_eight(0, n), low);
    if (n > 8) _mm256_maskstore_ps(p + 8, lanes_of_eight(0, n - 8), high);
  }
  void store_bfloat16(uint16_t* p) const {
    store_half(p, to_bfloat16(low));
    store_half(p + 8, to_bfloat16(high));
  }
  void store_float16(uint16_t* p) const {
    store_half(p, _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
    store_half(p + 8, _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT));
  }
  void store_int8(int8_t* p) const {  // of -127.5 to 127.5, to nearest even
    const auto words = [](__m256 v) {
      const __m256i codes = _mm256_cvtps_epi32(v);
      return _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    };
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words(low), words(high)));
  }
  static float first(Vec a) { return _mm256_cvtss_f32(a.low); }
  static float sum(Vec a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float largest(Vec a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static Mask lanes_between(int64_t begin, int64_t end) {
    return {_mm256_castsi256_ps(lanes_of_eight(begin, end)), _mm256_castsi256_ps(lanes_of_eight(begin - 8, end - 8))};
  }
};

#define MLSPEC_BOTH_HALVES(name, instruction) \
  inline Vec name(Vec a, Vec b) { return {instruction(a.low, b.low), instruction(a.high, b.high)}; }
MLSPEC_BOTH_HALVES(operator+, _mm256_add_ps)
MLSPEC_BOTH_HALVES(operator-, _mm256_sub_ps)
MLSPEC_BOTH_HALVES(operator*, _mm256_mul_ps)
MLSPEC_BOTH_HALVES(operator/, _mm256_div_ps)
MLSPEC_BOTH_HALVES(max, _mm256_max_ps)  // b where one is NaN
MLSPEC_BOTH_HALVES(min, _mm256_min_ps)
#undef MLSPEC_BOTH_HALVES

inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec neg_fma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Vec abs(Vec a) {
  const __m256 top = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(top, a.low), _mm256_andnot_ps(top, a.high)};
}
inline __m256 copy_sign(__m256 a, __m256 sign) {
  const __m256 top = _mm256_set1_ps(-0.f);
  return _mm256_or_ps(_mm256_andnot_ps(top, a), _mm256_and_ps(top, sign));
}
inline Vec copy_sign(Vec a, Vec sign) { return {copy_sign(a.low, sign.low), copy_sign(a.high, sign.high)}; }

// x * 2^n; shifted is n + 1.5 * 2^23, whose low bits are the integer. In two steps, so that subnormal results round.
inline __m256 times_power_of_two(__m256 x, __m256 shifted) {
  const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4B400000));
  const __m256i half = _mm256_srai_epi32(n, 1), bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
inline Vec times_power_of_two(Vec x, Vec shifted, Vec) {
  return {times_power_of_two(x.low, shifted.low), times_power_of_two(x.high, shifted.high)};
}

template <int kComparison>
inline Mask compare(Vec a, Vec b) {
  return {_mm256_cmp_ps(a.low, b.low, kComparison), _mm256_cmp_ps(a.high, b.high, kComparison)};
}
inline Mask less(Vec a, Vec b) { return compare<_CMP_LT_OQ>(a, b); }
inline Mask equal(Vec a, Vec b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask is_nan(Vec a) { return compare<_CMP_UNORD_Q>(a, a); }
inline Vec select(Mask m, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.low, yes.low, m.low), _mm256_blendv_ps(no.high, yes.high, m.high)};
}
inline uint32_t bits(Mask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.low)) | static_cast<uint32_t>(_mm256_movemask_ps(m.high)) << 8;
}
