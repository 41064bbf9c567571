// Sparse high parts from tables of sums, with AVX2: eight terms of one row at a time, or one term of eight rows.
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma")

namespace {

// [8 terms] -> the floats +- 2^shift.
inline __m256 coefficients(__m256i terms) {
  const __m256i shift = _mm256_and_si256(_mm256_srli_epi32(terms, 8), _mm256_set1_epi32(7));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(shift, _mm256_set1_epi32(127)), 23);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(terms, 11), 31);
  return _mm256_castsi256_ps(_mm256_or_si256(power, sign));
}

inline __m256i places(__m256i terms, __m256i groups) {
  const __m256i pattern = _mm256_and_si256(terms, _mm256_set1_epi32(15));
  return _mm256_add_epi32(_mm256_mullo_epi32(pattern, groups), _mm256_srli_epi32(terms, 12));
}

// Eight partial sums, added 4, 2 and 1 apart.
inline float total(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

void one_row(const mlspec_zipper_args& a, int64_t out_begin, int64_t out_end) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), groups = _mm256_set1_epi32(static_cast<int>(a.groups));
  for (int64_t out = out_begin; out < out_end; ++out) {
    __m256 sums = _mm256_setzero_ps();
    int32_t j = a.starts[out];
    const int32_t end = a.starts[out + 1];
    for (; j + 8 <= end; j += 8) {
      const __m256i terms = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a.terms + j));
      sums = _mm256_fmadd_ps(coefficients(terms), _mm256_i32gather_ps(a.tables, places(terms, groups), 4), sums);
    }
    if (j < end) {  // the sum of no input of a group is 0, and so are terms that are not there
      const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(end - j), lanes);
      const __m256i terms = _mm256_maskload_epi32(a.terms + j, there);
      sums = _mm256_fmadd_ps(coefficients(terms), _mm256_i32gather_ps(a.tables, places(terms, groups), 4), sums);
    }
    a.y[out] = std::fma(a.step[out], total(sums), a.y[out]);
  }
}

void eight_rows(const mlspec_zipper_args& a, int64_t out_begin, int64_t out_end) {
  alignas(32) int32_t terms[8] = {}, at[8];
  alignas(32) float times[8];
  const __m256i groups = _mm256_set1_epi32(static_cast<int>(a.groups));
  for (int64_t out = out_begin; out < out_end; ++out) {
    __m256 sums[8];
    for (__m256& sum : sums) sum = _mm256_setzero_ps();
    const auto add = [&](__m256i eight) {  // eight terms taken apart at once, then one by one
      _mm256_store_si256(reinterpret_cast<__m256i*>(at), _mm256_slli_epi32(places(eight, groups), 3));
      _mm256_store_ps(times, coefficients(eight));
      for (int i = 0; i < 8; ++i)
        sums[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(times + i), _mm256_loadu_ps(a.tables + at[i]), sums[i]);
    };
    int32_t j = a.starts[out];
    const int32_t end = a.starts[out + 1];
    for (; j + 8 <= end; j += 8) add(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a.terms + j)));
    if (j < end) {  // as for one row: terms that are not there add the sum of no input
      for (int i = 0; i < 8; ++i) terms[i] = j + i < end ? a.terms[j + i] : 0;
      add(_mm256_load_si256(reinterpret_cast<const __m256i*>(terms)));
    }
    for (int apart = 4; apart > 0; apart /= 2)
      for (int i = 0; i < apart; ++i) sums[i] = _mm256_add_ps(sums[i], sums[i + apart]);
    float own[8];
    _mm256_storeu_ps(own, sums[0]);
    for (int64_t row = 0; row < a.rows; ++row) {
      float& y = a.y[row * a.y_stride + out];
      y = std::fma(a.step[out], own[row], y);
    }
  }
}

}  // namespace

extern "C" void mlspec_zipper_lut_avx2(const mlspec_zipper_args* args, int64_t out_begin, int64_t out_end) {
  (args->lanes == 1 ? one_row : eight_rows)(*args, out_begin, out_end);
}

MLSPEC_TARGET_END
