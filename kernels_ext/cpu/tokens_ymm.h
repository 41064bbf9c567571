// Bfloat16 activations as floats with AVX2, for FloatTokens of tokens.h.

struct WidenYmm {
  static constexpr int kLanes = 8;
  static void widen(const uint16_t* from, float* to) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    _mm256_store_si256((__m256i*)to, _mm256_slli_epi32(words, 16));
  }
};
