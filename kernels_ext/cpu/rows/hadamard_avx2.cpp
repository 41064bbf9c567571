// Hadamard matrices with AVX2 and FMA.
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma")

namespace {

struct Vec {
  static constexpr int kLanes = 8;
  __m256 v;
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec all(float x) { return {_mm256_set1_ps(x)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  // other +- own: the lane whose bit is set takes the difference other - own.
  static __m256 level(__m256 own, __m256 other, __m256 signs) { return _mm256_add_ps(other, _mm256_xor_ps(own, signs)); }
  Vec short_levels() const {
    const __m256 one = _mm256_setr_ps(0.f, -0.f, 0.f, -0.f, 0.f, -0.f, 0.f, -0.f);
    const __m256 two = _mm256_setr_ps(0.f, 0.f, -0.f, -0.f, 0.f, 0.f, -0.f, -0.f);
    const __m256 four = _mm256_setr_ps(0.f, 0.f, 0.f, 0.f, -0.f, -0.f, -0.f, -0.f);
    __m256 x = level(v, _mm256_permute_ps(v, 0xB1), one);
    x = level(x, _mm256_permute_ps(x, 0x4E), two);
    return {level(x, _mm256_permute2f128_ps(x, x, 0x01), four)};
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }

#include "hadamard_passes.h"

}  // namespace

MLSPEC_HADAMARD(avx2)

MLSPEC_TARGET_END
