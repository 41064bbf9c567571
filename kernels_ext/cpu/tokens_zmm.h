// Bfloat16 activations with AVX-512: as floats, for FloatTokens of tokens.h, or as the pairs that vdpbf16ps takes.

struct WidenZmm {
  static constexpr int kLanes = 16;
  static void widen(const uint16_t* from, float* to) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    _mm512_store_si512(to, _mm512_slli_epi32(words, 16));
  }
};

template <int N>
struct PairTokens : RowTokens<N> {
  __m512bh pair(int t, int k) const {
    int32_t two;
    std::memcpy(&two, this->x + t * this->stride + k, 4);
    return (__m512bh)_mm512_set1_epi32(two);
  }
};
