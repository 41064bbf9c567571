// Sparse high parts from tables of sums, with AVX-512: sixteen terms of one row at a time, or one term of eight rows.
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

namespace {

// [16 terms] -> the floats +- 2^shift.
inline __m512 coefficients(__m512i terms) {
  const __m512i shift = _mm512_and_si512(_mm512_srli_epi32(terms, 8), _mm512_set1_epi32(7));
  const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(shift, _mm512_set1_epi32(127)), 23);
  return _mm512_castsi512_ps(_mm512_or_si512(power, _mm512_slli_epi32(_mm512_srli_epi32(terms, 11), 31)));
}

inline __m512i places(__m512i terms, __m512i groups) {
  const __m512i pattern = _mm512_and_si512(terms, _mm512_set1_epi32(15));
  return _mm512_add_epi32(_mm512_mullo_epi32(pattern, groups), _mm512_srli_epi32(terms, 12));
}

constexpr int kAhead = 512;  // terms: gathers fill the processor's window before it sees the next lines of them

// Up to 16 terms from `from`; those that are not there are 0, and add the sum of no input, which is 0.
inline __m512i terms_at(const int32_t* from, int32_t left) {
  _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
  const __mmask16 there = left >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1);
  return _mm512_maskz_loadu_epi32(there, from);
}

// Eight partial sums, added 4, 2 and 1 apart.
inline float total(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Term j goes to partial sum j mod 8: the lower eight of sixteen first.
void one_row(const mlspec_zipper_args& a, int64_t out_begin, int64_t out_end) {
  const __m512i groups = _mm512_set1_epi32(static_cast<int>(a.groups));
  for (int64_t out = out_begin; out < out_end; ++out) {
    __m256 sums = _mm256_setzero_ps();
    const int32_t end = a.starts[out + 1];
    for (int32_t j = a.starts[out]; j < end; j += 16) {
      const __m512i terms = terms_at(a.terms + j, end - j);
      const __m512 found = _mm512_i32gather_ps(places(terms, groups), a.tables, 4), times = coefficients(terms);
      sums = _mm256_fmadd_ps(_mm512_castps512_ps256(times), _mm512_castps512_ps256(found), sums);
      sums = _mm256_fmadd_ps(_mm512_maskz_extractf32x8_ps(0xFF, times, 1), _mm512_maskz_extractf32x8_ps(0xFF, found, 1), sums);
    }
    a.y[out] = std::fma(a.step[out], total(sums), a.y[out]);
  }
}

void eight_rows(const mlspec_zipper_args& a, int64_t out_begin, int64_t out_end) {
  const __m512i groups = _mm512_set1_epi32(static_cast<int>(a.groups));
  alignas(64) int32_t at[16];
  alignas(64) float times[16];
  for (int64_t out = out_begin; out < out_end; ++out) {
    __m256 sums[8];
    for (__m256& sum : sums) sum = _mm256_setzero_ps();
    const int32_t end = a.starts[out + 1];
    for (int32_t j = a.starts[out]; j < end; j += 16) {  // sixteen terms taken apart at once, then one by one
      const __m512i terms = terms_at(a.terms + j, end - j);
      _mm512_store_si512(at, _mm512_slli_epi32(places(terms, groups), 3));
      _mm512_store_ps(times, coefficients(terms));
      for (int i = 0; i < 8; ++i)
        sums[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(times + i), _mm256_loadu_ps(a.tables + at[i]), sums[i]);
      if (end - j <= 8) break;
      for (int i = 0; i < 8; ++i)
        sums[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(times + 8 + i), _mm256_loadu_ps(a.tables + at[8 + i]), sums[i]);
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

extern "C" void mlspec_zipper_lut_avx512vnni(const mlspec_zipper_args* args, int64_t out_begin, int64_t out_end) {
  (args->lanes == 1 ? one_row : eight_rows)(*args, out_begin, out_end);
}

MLSPEC_TARGET_END
