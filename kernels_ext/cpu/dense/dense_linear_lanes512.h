// Sums of the lanes of four AVX-512 registers: included after the target pragma of the files that use them.

inline __m512 add_neighbours(__m512 a, __m512 b) {  // each 128 bits: a01 a23 b01 b23
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
}

inline void add_lanes_of_four(const __m512* sum, float* total) {
  const __m512 quarters = add_neighbours(add_neighbours(sum[0], sum[1]), add_neighbours(sum[2], sum[3]));
  const __m256 upper = _mm512_castps512_ps256(_mm512_shuffle_f32x4(quarters, quarters, 0x0E));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), upper);
  _mm_storeu_ps(total, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}
