// Packing of activations with AVX2.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2")

namespace {

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr bool kTransposes = false;
  using Int = __m256i;
  static __m256i rounded(const float* x) {  // bfloat16 in the low half of each lane
    const __m256 value = _mm256_loadu_ps(x);
    const __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one());
    const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, nan), 16);
  }
  static __m256i one() { return _mm256_set1_epi32(1); }
  static void round_bfloat16(const float* x, uint16_t* out) {
    const __m256i both = _mm256_packus_epi32(rounded(x), rounded(x + 8));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(both, 0xD8));
  }
  static Int magnitude(const float* x) {
    return _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x)), _mm256_set1_epi32(0x7FFFFFFF));
  }
  static Int scaled(const float* x, float inverse) {  // what is no number becomes 0x80000000
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(inverse)));
  }
  static Int max(Int a, Int b) { return _mm256_max_epi32(a, b); }
  static Int add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int within(Int a, int32_t bound) {
    return _mm256_min_epi32(_mm256_max_epi32(a, _mm256_set1_epi32(-bound)), _mm256_set1_epi32(bound));
  }
  static void store(Int a, int32_t* out) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), a); }
  static void store_codes(Int a, int8_t* out) {
    const __m128i low_bytes = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(low_bytes));
    const __m128i halves = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), halves);
  }
  template <Int (*Op)(Int, Int)>
  static Int halve(Int a, Int b) {  // each 128 bits: a01 a23 b01 b23
    const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return Op(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xDD)));
  }
  template <Int (*Op)(Int, Int)>
  static Int reduce(const Int* a) {
    const Int low = halve<Op>(halve<Op>(a[0], a[1]), halve<Op>(a[2], a[3]));
    const Int high = halve<Op>(halve<Op>(a[4], a[5]), halve<Op>(a[6], a[7]));
    return Op(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
  }
  static Int reduce_max(const Int* a) { return reduce<max>(a); }
  static Int reduce_add(const Int* a) { return reduce<add>(a); }
};

#include "pack_rows_order.h"

}  // namespace

MLSPEC_PACK_ROWS(avx2)

MLSPEC_TARGET_END
