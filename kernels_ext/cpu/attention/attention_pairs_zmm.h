// How do keys and values lie as pairs of bfloat16 with AVX-512? As vdpbf16ps and AMX take them.
//
// Included inside the anonymous namespaces of attention_{avx512bf16,amx}.cpp, after transpose_zmm.h and attention_blocks.h.

struct PairLayout {
  using Element = uint16_t;
  static constexpr int kPair = 2;

  static __m512bh narrow(Vec low, Vec high) { return (__m512bh)_mm512_cvtne2ps_pbh(high.v, low.v); }

  static void store_query(const float* from, uint16_t* to) {
    _mm512_storeu_si512(to, (__m512i)narrow(Vec::load(from), Vec::load(from + kLanes)));
  }

  // kStep values of codes, as elements: each is rounded to bfloat16
  static void store_widened(Vec first, Vec second, char* to) { _mm512_storeu_si512(to, (__m512i)narrow(first, second)); }

  // Of 16 codes the elements, twice, and those of kStep nibbles.
  using Table = __m512i;
  static Table table(Vec values) { return (__m512i)narrow(values, values); }
  static void store_looked_up(Table table, const uint8_t* from, char* to) {
    const __m256i codes = nibbles(from);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(codes), table));
  }

  // kStep weights, rounded; -> sum plus the weights as they are then, lane by lane
  static Vec store_weights(const Vec* from, uint16_t* to, Vec sum) {
    const __m512bh rounded = narrow(from[0], from[1]);
    _mm512_storeu_si512(to, (__m512i)rounded);
    return {_mm512_dpbf16_ps(sum.v, rounded, (__m512bh)_mm512_set1_epi16(0x3F80))};
  }

  // to[element / 2][stride][2], of 16 slots
  static void load_keys(const mlspec_attention_args&, const CacheRows& rows, int64_t padded, uint16_t* to, int64_t stride) {
    for (int64_t d = 0; d < padded; d += kStep)
      transpose_words(rows.first + d * 2, rows.stride, reinterpret_cast<uint32_t*>(to + d * stride), stride);
  }

  // to[slot / 2][padded][2], of 16 slots, elements in the order that restore_order ends; -> products plus zero times each,
  // where asked
  template <bool kAsk>
  static Vec load_values(const mlspec_attention_args&, const CacheRows& rows, int64_t padded, uint16_t* to, Vec products) {
    for (int64_t d = 0; d < padded; d += kStep) {
#pragma GCC unroll 8
      for (int s = 0; s < kLanes; s += 2) {
        const char* const row = rows.first + s * rows.stride + d * 2;
        const __m512i even = _mm512_loadu_si512(row), odd = _mm512_loadu_si512(row + rows.stride);
        uint16_t* const out = to + s * padded + d * 2;
        _mm512_storeu_si512(out, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(out + kStep, _mm512_unpackhi_epi16(even, odd));
        if (!kAsk) continue;
        products.v = _mm512_dpbf16_ps(products.v, (__m512bh)even, (__m512bh)_mm512_setzero_si512());
        products.v = _mm512_dpbf16_ps(products.v, (__m512bh)odd, (__m512bh)_mm512_setzero_si512());
      }
    }
    return products;
  }

  // Sums of a row of values: of a step first elements 0 to 3 of every eight, then 4 to 7, as 16-bit words are unpacked.
  static void restore_order(float* row, int64_t padded) {
    for (int64_t d = 0; d < padded; d += kStep) {
      const __m512 low = _mm512_loadu_ps(row + d), high = _mm512_loadu_ps(row + d + kLanes);
      const __m512 front = _mm512_shuffle_f32x4(low, high, 0x44), back = _mm512_shuffle_f32x4(low, high, 0xEE);
      _mm512_storeu_ps(row + d, _mm512_shuffle_f32x4(front, front, 0xD8));
      _mm512_storeu_ps(row + d + kLanes, _mm512_shuffle_f32x4(back, back, 0xD8));
    }
  }
};
