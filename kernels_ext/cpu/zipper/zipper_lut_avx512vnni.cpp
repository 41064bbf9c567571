// Sparse high parts with AVX-512: the 64 inputs of a cell are a table in two registers, of which one permutation looks up 32.
#include <immintrin.h>

#include <cstdint>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

namespace {

constexpr int kOutputs = MLSPEC_ZIPPER_OUTPUTS, kInputs = MLSPEC_ZIPPER_INPUTS;
constexpr int kRowsAtOnce = 6;         // tables and sums of these are in registers
constexpr int64_t kRowsOfSlices = 64;  // x of so many stays in the second cache, while slice after slice reads it
constexpr int kAhead = 1024;           // words, of the next lines

constexpr __mmask16 kAll = 0xFFFF;     // GCC warns of the forms without a mask

struct Slice {
  const int32_t* starts;
  const int16_t* words;
  int64_t across, in;
};

// Bfloat16 of the even and odd lanes, widened; and the values in front of them.
inline __m512 even(__m512i x) { return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, x, 16)); }
inline __m512 odd(__m512i x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline __m512 even_values(__m512i words) {
  return _mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_srai_epi32(kAll, _mm512_maskz_slli_epi32(kAll, words, 16), 24));
}
inline __m512 odd_values(__m512i words) {
  return _mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_srai_epi32(kAll, words, 24));
}

// y += step * sums, where sums come in even and odd outputs.
inline void end_of_row(const mlspec_zipper_args& a, int64_t row, int64_t slice, __m512 evens, __m512 odds) {
  const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
  const int64_t first = slice * kOutputs, left = a.out_features - first;
  const uint32_t there = left >= kOutputs ? ~0u : (1u << left) - 1;
  float* const y = a.y + row * a.y_stride + first;
  const float* const step = a.step + first;
  const __mmask16 low = static_cast<__mmask16>(there), high = static_cast<__mmask16>(there >> 16);
  const __m512 front = _mm512_permutex2var_ps(evens, lower, odds), back = _mm512_permutex2var_ps(evens, upper, odds);
  _mm512_mask_storeu_ps(y, low, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(low, step), front, _mm512_maskz_loadu_ps(low, y)));
  if (!high) return;
  _mm512_mask_storeu_ps(
      y + 16, high, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(high, step + 16), back, _mm512_maskz_loadu_ps(high, y + 16)));
}

template <int kRows>
inline void add_rows(const mlspec_zipper_args& a, const Slice& s, int64_t slice, int64_t row) {
  __m512 evens[kRows], odds[kRows];
  for (int r = 0; r < kRows; ++r) evens[r] = odds[r] = _mm512_setzero_ps();
  const uint16_t* const x = a.x + row * a.x_stride;
  const int16_t* words = s.words;
  for (int64_t cell = 0; cell < s.across; ++cell) {
    const int32_t slots = s.starts[cell + 1] - s.starts[cell];
    const int64_t at = cell * kInputs;
    const __mmask32 second = at + kInputs <= s.in ? ~0u : 0;  // the last cell may have 32 inputs
    __m512i front[kRows], back[kRows];
    for (int r = 0; r < kRows; ++r) {
      front[r] = _mm512_loadu_si512(x + r * a.x_stride + at);
      back[r] = _mm512_maskz_loadu_epi16(second, x + r * a.x_stride + at + 32);
    }
    for (int32_t slot = 0; slot < slots; ++slot, words += kOutputs) {
      _mm_prefetch(reinterpret_cast<const char*>(words + kAhead), _MM_HINT_T0);
      const __m512i own = _mm512_loadu_si512(words);
      const __m512 times_even = even_values(own), times_odd = odd_values(own);
      for (int r = 0; r < kRows; ++r) {
        const __m512i found = _mm512_permutex2var_epi16(front[r], own, back[r]);
        evens[r] = _mm512_fmadd_ps(times_even, even(found), evens[r]);
        odds[r] = _mm512_fmadd_ps(times_odd, odd(found), odds[r]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) end_of_row(a, row + r, slice, evens[r], odds[r]);
}

}  // namespace

extern "C" void mlspec_zipper_lut_avx512vnni(const mlspec_zipper_args* args, int64_t slice_begin, int64_t slice_end) {
  const mlspec_zipper_args& a = *args;
  const int64_t across = (a.in_features + kInputs - 1) / kInputs;
  for (int64_t first = 0; first < a.rows; first += kRowsOfSlices) {
    const int64_t end = first + kRowsOfSlices < a.rows ? first + kRowsOfSlices : a.rows;
    for (int64_t slice = slice_begin; slice < slice_end; ++slice) {
      const int32_t* const starts = a.starts + slice * across;
      const Slice own{starts, a.words + static_cast<int64_t>(starts[0]) * kOutputs, across, a.in_features};
      for (int64_t row = first; row < end;) {
        const int64_t passes = (end - row + kRowsAtOnce - 1) / kRowsAtOnce, rows = (end - row + passes - 1) / passes;
        switch (rows) {
          case 1: add_rows<1>(a, own, slice, row); break;
          case 2: add_rows<2>(a, own, slice, row); break;
          case 3: add_rows<3>(a, own, slice, row); break;
          case 4: add_rows<4>(a, own, slice, row); break;
          case 5: add_rows<5>(a, own, slice, row); break;
          default: add_rows<kRowsAtOnce>(a, own, slice, row);
        }
        row += rows;
      }
    }
  }
}

MLSPEC_TARGET_END
