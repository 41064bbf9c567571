// int4 tiles to bfloat16 rows with AVX-512: each output of a group has a table of 16 numbers, vpermw looks codes up in it.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,f16c")

namespace {

using mlspec::kBlock, mlspec::cpu_tiles::kTileBytes, mlspec::cpu_tiles::kTileOutputs;

// What the 16 codes mean, twice: vpermw reads five bits of an index, of which the upper one is another code's.
inline __m512i value_table(float zero, float scale) {
  const __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 exact = _mm512_mul_ps(_mm512_sub_ps(codes, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
  const __m512i bits = _mm512_castps_si512(exact);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(exact, exact, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_set1_epi32(_mm512_srli_epi32(up, 16), nan, 0x7FC0);
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(rounded));
}

struct Tables {
  alignas(64) uint16_t value[kTileOutputs][32];

  void fill(const mlspec_linear_args& a, int64_t at) {
    alignas(64) float scales[kTileOutputs], zeros[kTileOutputs];
    const __m256i halves = _mm256_loadu_si256((const __m256i*)(static_cast<const uint16_t*>(a.scale) + at));
    _mm512_store_ps(scales, _mm512_cvtph_ps(halves));
    const __m512i points = a.zero ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(a.zero + at))) : _mm512_set1_epi32(8);
    _mm512_store_ps(zeros, _mm512_cvtepi32_ps(points));
    for (int r = 0; r < kTileOutputs; ++r) _mm512_store_si512(value[r], value_table(zeros[r], scales[r]));
  }
};

// The four 4-byte pieces of each output side by side: to[k][4 l + j] of lane l is piece j of output 4 l + k.
inline void gather_outputs(const uint8_t* bytes, __m512i (&to)[4]) {
  const __m512i row0 = _mm512_loadu_si512(bytes), row1 = _mm512_loadu_si512(bytes + 64);
  const __m512i row2 = _mm512_loadu_si512(bytes + 128), row3 = _mm512_loadu_si512(bytes + 192);
  const __m512i low01 = _mm512_unpacklo_epi32(row0, row1), high01 = _mm512_unpackhi_epi32(row0, row1);
  const __m512i low23 = _mm512_unpacklo_epi32(row2, row3), high23 = _mm512_unpackhi_epi32(row2, row3);
  to[0] = _mm512_unpacklo_epi64(low01, low23), to[1] = _mm512_unpackhi_epi64(low01, low23);
  to[2] = _mm512_unpacklo_epi64(high01, high23), to[3] = _mm512_unpackhi_epi64(high01, high23);
}

// One block of 32 elements of the first `outputs` outputs of a tile.
inline void write_block(const uint8_t* bytes, const Tables& tables, int64_t outputs, int64_t in, uint16_t* dense) {
  // Words e of 128-bit lane q: byte 4 q + e % 4 of the output's sixteen, its low nibble where e < 4, else its high one.
  const __m512i spread = _mm512_add_epi8(
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, -64, 1, -64, 2, -64, 3, -64, 0, -64, 1, -64, 2, -64, 3, -64)),
      _mm512_set_epi32(0x000C000C, 0x000C000C, 0x000C000C, 0x000C000C, 0x00080008, 0x00080008, 0x00080008, 0x00080008,
                       0x00040004, 0x00040004, 0x00040004, 0x00040004, 0, 0, 0, 0));
  const __m512i shifts = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0, 0, 0, 4, 4, 4, 4));
  alignas(64) __m512i pieces[4];
  gather_outputs(bytes, pieces);
  for (int64_t r = 0; r < outputs; ++r) {
    const __m128i own = _mm_load_si128(reinterpret_cast<const __m128i*>(&pieces[r % 4]) + r / 4);
    const __m512i words = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(own), spread);
    const __m512i codes = _mm512_srlv_epi16(words, shifts);
    _mm512_storeu_si512(dense + r * in, _mm512_permutexvar_epi16(codes, _mm512_load_si512(tables.value[r])));
  }
}

}  // namespace

extern "C" void mlspec_int4_dequantize_avx512vnni(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end,
                                                  uint16_t* dense) {
  const mlspec_linear_args& a = *args;
  const int64_t in = a.in_features, groups = in / a.group, group_blocks = a.group / kBlock;
  Tables tables;
  for (int64_t first = out_begin; first < out_end; first += kTileOutputs, dense += kTileOutputs * in) {
    const int64_t tile = first / kTileOutputs, outputs = std::min(out_end - first, kTileOutputs);
    const uint8_t* bytes = static_cast<const uint8_t*>(a.weight) + tile * in / kBlock * kTileBytes;
    for (int64_t g = 0; g < groups; ++g) {
      tables.fill(a, (tile * groups + g) * kTileOutputs);
      for (int64_t b = 0; b < group_blocks; ++b, bytes += kTileBytes) {
        uint16_t* const block = dense + (g * group_blocks + b) * kBlock;
        if (outputs == kTileOutputs) {
          write_block(bytes, tables, kTileOutputs, in, block);  // unrolled
        } else {
          write_block(bytes, tables, outputs, in, block);
        }
      }
    }
  }
}

MLSPEC_TARGET_END
