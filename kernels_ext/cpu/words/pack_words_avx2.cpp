// Words of other libraries' 4-bit codes, moved with AVX2.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma")

namespace {

constexpr int kLanes = 8;

struct Vec {
  __m256i v;
  static Vec zero() { return {_mm256_setzero_si256()}; }
  static __m256i first(int64_t lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vec load(const uint32_t* p, int64_t lanes) {
    if (lanes == kLanes) return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
    return {_mm256_maskload_epi32(reinterpret_cast<const int*>(p), first(lanes))};
  }
  void store(uint32_t* p, int64_t lanes) const {
    if (lanes == kLanes) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
    _mm256_maskstore_epi32(reinterpret_cast<int*>(p), first(lanes), v);
  }
  Vec shifted(int left, int right) const {
    return {_mm256_srl_epi32(_mm256_sll_epi32(v, _mm_cvtsi32_si128(left)), _mm_cvtsi32_si128(right))};
  }
  // The bits of `mask` are those of `other`; here they are 0.
  Vec with(Vec other, uint32_t mask) const {
    return {_mm256_or_si256(v, _mm256_and_si256(other.v, _mm256_set1_epi32(static_cast<int>(mask))))};
  }
  static void transpose(Vec (&rows)[kLanes]) {
    __m256i pairs[kLanes], fours[kLanes];
    for (int i = 0; i < kLanes; i += 2) {
      pairs[i] = _mm256_unpacklo_epi32(rows[i].v, rows[i + 1].v);
      pairs[i + 1] = _mm256_unpackhi_epi32(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < kLanes; i += 4)
      for (int half = 0; half < 2; ++half) {
        fours[i + 2 * half] = _mm256_unpacklo_epi64(pairs[i + half], pairs[i + half + 2]);
        fours[i + 2 * half + 1] = _mm256_unpackhi_epi64(pairs[i + half], pairs[i + half + 2]);
      }
    for (int i = 0; i < 4; ++i) {
      rows[i].v = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
      rows[i + 4].v = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
    }
  }
};

inline Vec operator^(Vec a, Vec b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Vec operator&(Vec a, uint32_t mask) { return {_mm256_and_si256(a.v, _mm256_set1_epi32(static_cast<int>(mask)))}; }

#include "pack_words_blocks.h"

}  // namespace

MLSPEC_PACK_WORDS(avx2)

MLSPEC_TARGET_END
