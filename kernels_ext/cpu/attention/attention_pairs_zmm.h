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

  // kStep weights, rounded; -> sum plus the weights as they are then, lane by lane
  static Vec store_weights(const Vec* from, uint16_t* to, Vec sum) {
    const __m512bh rounded = narrow(from[0], from[1]);
    _mm512_storeu_si512(to, (__m512i)rounded);
    return {_mm512_dpbf16_ps(sum.v, rounded, (__m512bh)_mm512_set1_epi16(0x3F80))};
  }

  // to[element / 2][stride][2], of 16 slots
  static void load_keys(const mlspec_attention_args&, const char* const* rows, int64_t padded, uint16_t* to, int64_t stride) {
    for (int64_t d = 0; d < padded; d += kStep)
      transpose_words(rows, d * 2, reinterpret_cast<uint32_t*>(to + d * stride), stride);
  }

  // to[slot / 2][padded][2], of 16 slots; -> products plus zero times each, where asked
  template <bool kAsk>
  static Vec load_values(const mlspec_attention_args&, const char* const* rows, int64_t padded, uint16_t* to, Vec products) {
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low = _mm512_or_si512(count, _mm512_slli_epi32(_mm512_add_epi32(count, _mm512_set1_epi32(32)), 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t d = 0; d < padded; d += kStep) {
#pragma GCC unroll 8
      for (int s = 0; s < kLanes; s += 2) {
        const __m512i even = _mm512_loadu_si512(rows[s] + d * 2), odd = _mm512_loadu_si512(rows[s + 1] + d * 2);
        uint16_t* const out = to + s * padded + d * 2;
        _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_storeu_si512(out + kStep, _mm512_permutex2var_epi16(even, high, odd));
        if (!kAsk) continue;
        products.v = _mm512_dpbf16_ps(products.v, (__m512bh)even, (__m512bh)_mm512_setzero_si512());
        products.v = _mm512_dpbf16_ps(products.v, (__m512bh)odd, (__m512bh)_mm512_setzero_si512());
      }
    }
    return products;
  }
};
