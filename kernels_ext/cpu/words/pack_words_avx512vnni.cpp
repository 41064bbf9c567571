// Words of other libraries' 4-bit codes, moved with AVX-512.
#include <immintrin.h>

#include <cstdint>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl")

namespace {

constexpr int kLanes = 16;

struct Vec {
  __m512i v;
  static Vec zero() { return {_mm512_setzero_si512()}; }
  static __mmask16 first(int64_t lanes) { return static_cast<__mmask16>((1u << lanes) - 1); }
  static Vec load(const uint32_t* p, int64_t lanes) { return {_mm512_maskz_loadu_epi32(first(lanes), p)}; }
  void store(uint32_t* p, int64_t lanes) const {
    if (lanes == kLanes) return _mm512_storeu_si512(p, v);
    _mm512_mask_storeu_epi32(p, first(lanes), v);
  }
  Vec shifted(int left, int right) const {
    return {_mm512_srl_epi32(_mm512_sll_epi32(v, _mm_cvtsi32_si128(left)), _mm_cvtsi32_si128(right))};
  }
  // The bits of `mask` are those of `other`; here they are 0.
  Vec with(Vec other, uint32_t mask) const {
    return {_mm512_ternarylogic_epi32(v, other.v, _mm512_set1_epi32(static_cast<int>(mask)), 0xF8)};  // a | (b & c)
  }
  static void transpose(Vec (&rows)[kLanes]) {
    __m512i pairs[kLanes], fours[kLanes];
    for (int i = 0; i < kLanes; i += 2) {
      pairs[i] = _mm512_unpacklo_epi32(rows[i].v, rows[i + 1].v);
      pairs[i + 1] = _mm512_unpackhi_epi32(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < kLanes; i += 4)
      for (int half = 0; half < 2; ++half) {
        fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + half + 2]);
        fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + half + 2]);
      }
    // fours[4 g + j], part q of four words: rows 4 g .. 4 g + 3, column 4 q + j
    for (int j = 0; j < 4; ++j) {
      const __m512i even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88), odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xDD);
      const __m512i even2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
      const __m512i odd2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xDD);
      rows[j].v = _mm512_shuffle_i32x4(even, even2, 0x88);
      rows[4 + j].v = _mm512_shuffle_i32x4(odd, odd2, 0x88);
      rows[8 + j].v = _mm512_shuffle_i32x4(even, even2, 0xDD);
      rows[12 + j].v = _mm512_shuffle_i32x4(odd, odd2, 0xDD);
    }
  }
};

inline Vec operator^(Vec a, Vec b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Vec operator&(Vec a, uint32_t mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(mask)))}; }

#include "pack_words_blocks.h"

}  // namespace

MLSPEC_PACK_WORDS(avx512vnni)

MLSPEC_TARGET_END
