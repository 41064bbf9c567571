// Packing of activations for AMX: AVX-512, and a tile [16 pairs][16 rows][2] is a transpose of 16 x 16 words.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl")

namespace {

#include "pack_rows_vec512.h"

struct Vec : Vec512 {
  static constexpr bool kTransposes = true;

  // Four rows of 16 words to 16 groups of four: quarter q of quad[i] is words (row 0..3) of pair 4 q + i.
  static void transpose_quads(const float* x, int64_t stride, int64_t rows, __m512i* quad) {
    __m512i row[4];
    for (int r = 0; r < 4; ++r) row[r] = r < rows ? rounded_pairs(x + r * stride) : _mm512_setzero_si512();
    const __m512i low01 = _mm512_unpacklo_epi32(row[0], row[1]), high01 = _mm512_unpackhi_epi32(row[0], row[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(row[2], row[3]), high23 = _mm512_unpackhi_epi32(row[2], row[3]);
    quad[0] = _mm512_unpacklo_epi64(low01, low23);
    quad[1] = _mm512_unpackhi_epi64(low01, low23);
    quad[2] = _mm512_unpacklo_epi64(high01, high23);
    quad[3] = _mm512_unpackhi_epi64(high01, high23);
  }

  // One row alone, as in a decode step: each word, and zeros where the rows beyond are this call's to fill.
  static void tile_row(const float* x, int64_t row, __mmask16 written, uint16_t* tile) {
    alignas(64) uint32_t pair[16];
    _mm512_store_si512(pair, rounded_pairs(x));
    for (int p = 0; p < 16; ++p) {
      const __m512i line = _mm512_maskz_set1_epi32(static_cast<__mmask16>(1u << row), static_cast<int>(pair[p]));
      _mm512_mask_storeu_epi32(tile + p * 32, written, line);
    }
  }

  // Rows [first, last) of a tile; those from `rows` on become zero. 32 elements of each.
  static void tile_block(const float* x, int64_t stride, int64_t rows, int64_t first, int64_t last, uint16_t* tile) {
    const __mmask16 written = static_cast<__mmask16>((1u << last) - (1u << first));
    if (std::min(rows, last) == first + 1) return tile_row(x + first * stride, first, written, tile);
    __m512i quad[4][4] = {};
    for (int64_t r = first & ~int64_t(3); r < std::min(rows, last); r += 4)
      transpose_quads(x + r * stride, stride, std::min(rows, last) - r, quad[r / 4]);
    for (int i = 0; i < 4; ++i) store_lines(quad[0][i], quad[1][i], quad[2][i], quad[3][i], written, tile + i * 32);
  }

  // Quarter q of a, b, c, d, side by side, is the line of pair 4 q + i: a 4 x 4 transpose of quarters.
  static void store_lines(__m512i a, __m512i b, __m512i c, __m512i d, __mmask16 written, uint16_t* tile) {
    const __m512i ab_even = _mm512_shuffle_i32x4(a, b, 0x88), ab_odd = _mm512_shuffle_i32x4(a, b, 0xDD);
    const __m512i cd_even = _mm512_shuffle_i32x4(c, d, 0x88), cd_odd = _mm512_shuffle_i32x4(c, d, 0xDD);
    // ab_even: a0 a2 b0 b2; the line of q = 0 is a0 b0 c0 d0, of q = 2 a2 b2 c2 d2.
    _mm512_mask_storeu_epi32(tile, written, _mm512_shuffle_i32x4(ab_even, cd_even, 0x88));
    _mm512_mask_storeu_epi32(tile + 4 * 32, written, _mm512_shuffle_i32x4(ab_odd, cd_odd, 0x88));
    _mm512_mask_storeu_epi32(tile + 8 * 32, written, _mm512_shuffle_i32x4(ab_even, cd_even, 0xDD));
    _mm512_mask_storeu_epi32(tile + 12 * 32, written, _mm512_shuffle_i32x4(ab_odd, cd_odd, 0xDD));
  }
};

#include "pack_rows_order.h"

}  // namespace

MLSPEC_PACK_ROWS(amx)

MLSPEC_TARGET_END
