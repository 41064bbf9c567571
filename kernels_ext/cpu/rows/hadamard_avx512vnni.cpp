// Hadamard matrices with AVX-512 (F, DQ): 16 floats a register.
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512dq,fma")

namespace {

struct Vec {
  static constexpr int kLanes = 16;
  __m512 v;
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec all(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  // other +- own: the lanes of `upper` take the difference other - own.
  static __m512 level(__m512 own, __m512 other, __mmask16 upper) {
    return _mm512_mask_sub_ps(_mm512_add_ps(other, own), upper, other, own);
  }
  Vec short_levels() const {
    __m512 x = level(v, _mm512_permute_ps(v, 0xB1), 0xAAAA);
    x = level(x, _mm512_permute_ps(x, 0x4E), 0xCCCC);
    x = level(x, _mm512_shuffle_f32x4(x, x, 0xB1), 0xF0F0);
    return {level(x, _mm512_shuffle_f32x4(x, x, 0x4E), 0xFF00)};
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }

#include "hadamard_passes.h"

}  // namespace

extern "C" void mlspec_hadamard_avx2(const mlspec_hadamard* how, int64_t width, float* x);

// Parts that are no whole registers: eight floats at a time.
extern "C" void mlspec_hadamard_avx512vnni(const mlspec_hadamard* how, int64_t width, float* x) {
  if (how->size / how->order * how->inner % kLanes) return mlspec_hadamard_avx2(how, width, x);
  rotate_row(*how, width, x);
}

MLSPEC_TARGET_END
