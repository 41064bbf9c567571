// How else could a high part of -1, 0 and 1 be multiplied? From tables that every group of every row looks up (dense), and by signed
// adds over rows of columns (CSR). Plain C; AVX-512 where this machine has it.
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// Of every 4 inputs the 16 sums of some of them.
void make_tables(const float* x, int64_t groups, float* tables) {
  for (int64_t g = 0; g < groups; ++g) {
    float* const sums = tables + g * 16;
    sums[0] = 0.0f;
    for (int place = 0; place < 4; ++place)
      for (int pattern = 0; pattern < 1 << place; ++pattern) sums[pattern | 1 << place] = sums[pattern] + x[g * 4 + place];
  }
}

#ifdef __AVX512F__
// 16 nibbles, of outputs 0..7 low and 8..15 high.
inline __m512i indices(const uint8_t* from) {
  int64_t bytes;
  std::memcpy(&bytes, from, 8);
  const __m128i all = _mm_cvtsi64_si128(bytes), low = _mm_and_si128(all, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(all, 4), _mm_set1_epi8(15));
  return _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, high));
}

// kRows rows of x and kBlocks blocks of 16 outputs, all groups: a table is one register.
template <int kRows, int kBlocks>
void look_up(const uint8_t* patterns, const float* tables, int64_t groups, const float* step, float* y, int64_t stride) {
  __m512 ones[kRows][kBlocks], twos[kRows][kBlocks];
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) ones[r][b] = twos[r][b] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512 table[kRows];
    for (int r = 0; r < kRows; ++r) table[r] = _mm512_loadu_ps(tables + (r * groups + g) * 16);
    for (int b = 0; b < kBlocks; ++b) {
      const uint8_t* const own = patterns + (b * groups + g) * 16;
      const __m512i one = indices(own), two = indices(own + 8);
      for (int r = 0; r < kRows; ++r) {
        ones[r][b] = _mm512_add_ps(ones[r][b], _mm512_permutexvar_ps(one, table[r]));
        twos[r][b] = _mm512_add_ps(twos[r][b], _mm512_permutexvar_ps(two, table[r]));
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) {
      const __m512 sum = _mm512_fnmadd_ps(_mm512_set1_ps(2.0f), twos[r][b], ones[r][b]);
      _mm512_storeu_ps(y + r * stride + b * 16, _mm512_mul_ps(sum, _mm512_loadu_ps(step + b * 16)));
    }
}
#endif

}  // namespace

extern "C" {

int mlspec_has_avx512() {
#ifdef __AVX512F__
  return 1;
#else
  return 0;
#endif
}

#ifdef __AVX512F__
// patterns [out / 16][in / 4][2 planes][8 bytes], value = plane 0 - 2 plane 1; out a multiple of 64, rows 1 or a multiple of 8.
void mlspec_dense_tables(const uint8_t* patterns, const float* step, const float* x, int64_t rows, int64_t in, int64_t out, float* y) {
  static thread_local std::vector<float> tables;
  const int64_t groups = in / 4, block = groups * 16;
  tables.resize(rows * groups * 16);
  for (int64_t r = 0; r < rows; ++r) make_tables(x + r * in, groups, tables.data() + r * groups * 16);
  if (rows == 1) {
    for (int64_t m = 0; m < out; m += 64) look_up<1, 4>(patterns + m / 16 * block, tables.data(), groups, step + m, y + m, out);
    return;
  }
  for (int64_t r = 0; r < rows; r += 8)
    for (int64_t m = 0; m < out; m += 16)
      look_up<8, 1>(patterns + m / 16 * block, tables.data() + r * groups * 16, groups, step + m, y + r * out + m, out);
}

// Of row m the columns starts[2 m] .. starts[2 m + 1] are added, those up to starts[2 m + 2] subtracted; rows 1 or a multiple of 8.
void mlspec_signed_rows(const int32_t* starts, const uint16_t* columns, const float* step, const float* x, int64_t rows, int64_t in,
                        int64_t out, float* y) {
  if (rows == 1) {
    const auto sum = [&](int32_t from, int32_t end) {
      __m512 total = _mm512_setzero_ps();
      for (int32_t j = from; j < end; j += 16) {
        const __mmask16 there = end - j >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << (end - j)) - 1);
        const __m512i at = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, columns + j));
        total = _mm512_add_ps(total, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, at, x, 4));
      }
      return _mm512_reduce_add_ps(total);
    };
    for (int64_t m = 0; m < out; ++m)
      y[m] = step[m] * (sum(starts[2 * m], starts[2 * m + 1]) - sum(starts[2 * m + 1], starts[2 * m + 2]));
    return;
  }
  static thread_local std::vector<float> turned;
  turned.resize(in * 8);
  for (int64_t r = 0; r < rows; r += 8) {
    for (int64_t k = 0; k < in; ++k)
      for (int64_t i = 0; i < 8; ++i) turned[k * 8 + i] = x[(r + i) * in + k];
    for (int64_t m = 0; m < out; ++m) {
      __m256 sums[2][2] = {{_mm256_setzero_ps(), _mm256_setzero_ps()}, {_mm256_setzero_ps(), _mm256_setzero_ps()}};
      for (int sign = 0; sign < 2; ++sign)
        for (int32_t j = starts[2 * m + sign]; j < starts[2 * m + sign + 1]; ++j)
          sums[sign][j & 1] = _mm256_add_ps(sums[sign][j & 1], _mm256_loadu_ps(turned.data() + columns[j] * 8));
      float own[8];
      _mm256_storeu_ps(own, _mm256_sub_ps(_mm256_add_ps(sums[0][0], sums[0][1]), _mm256_add_ps(sums[1][0], sums[1][1])));
      for (int i = 0; i < 8; ++i) y[(r + i) * out + m] = step[m] * own[i];
    }
  }
}
#endif

}  // extern "C"
