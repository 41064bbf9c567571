// How does AVX2 broadcast four activations, and how do instructions that multiply four int8 at once add up a block?
//
// Included inside the anonymous namespaces of int8_linear_{avx2,avxvnni,avxvnniint8}.cpp.

inline __m256i x_dword(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// Two chains of four: the latency of eight in a row would show at one token. Dot has add(sum, codes, x).
template <class Dot>
struct TwoChains {
  template <class Format>
  static __m256i dot(__m256i dots, const __m256i (&codes)[8], const int8_t* x) {
    __m256i odd = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int k = 0; k < 8; k += 2) {
      dots = Dot::add(dots, codes[k], x_dword(x + 4 * k));
      odd = Dot::add(odd, codes[k + 1], x_dword(x + 4 * k + 4));
    }
    return _mm256_add_epi32(dots, odd);
  }
};
