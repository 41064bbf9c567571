// 4-bit weights times int8 activations with AVX-VNNI-INT8: vpdpbssd takes signed codes, so E2M1 needs no correction.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"

// GCC knows the instruction from 13 on (the name before that is unknown to its target pragma), Clang from 16 on.
#if (defined(__clang__) && __clang_major__ >= 16) || (!defined(__clang__) && __GNUC__ >= 13)
#define MLSPEC_HAS_DPBSSD
#endif

#if defined(__clang__) && defined(MLSPEC_HAS_DPBSSD)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnniint8"))), apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#elif defined(MLSPEC_HAS_DPBSSD)
#pragma GCC target("avx2,fma,f16c,avxvnniint8")
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace {

#if defined(MLSPEC_INT8_EMULATED)  // for tests: the same kernel on a processor without the instruction
inline __m256i dpbssd(__m256i sum, __m256i a, __m256i b) {
  const __m256i low = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8),
                                        _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i high = _mm256_madd_epi16(_mm256_srai_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(low, high));
}
#elif defined(MLSPEC_HAS_DPBSSD)
inline __m256i dpbssd(__m256i sum, __m256i a, __m256i b) { return _mm256_dpbssd_epi32(sum, a, b); }
#else
// VEX.256.F2.0F38.W0 50 /r, byte by byte: assemblers before binutils 2.40 do not know it either.
inline __m256i dpbssd(__m256i sum, __m256i a, __m256i b) {
  asm(R"(
    .irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15
    .ifc %0,%%ymm\n
    .set mlspec_sum,\n
    .endif
    .ifc %1,%%ymm\n
    .set mlspec_a,\n
    .endif
    .ifc %2,%%ymm\n
    .set mlspec_b,\n
    .endif
    .endr
    .byte 0xC4, (0x42 | ((~mlspec_sum & 8) << 4) | ((~mlspec_b & 8) << 2)), (0x07 | ((~mlspec_a & 15) << 3))
    .byte 0x50, (0xC0 | ((mlspec_sum & 7) << 3) | (mlspec_b & 7)))"
      : "+x"(sum)
      : "x"(a), "x"(b));
  return sum;
}
#endif

struct Dot {
  static constexpr bool kSigned = true;
  static __m256i x_dword(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }
  // Two chains of four: the latency of eight in a row would show at one token.
  template <class Format>
  static __m256i dot(__m256i dots, const __m256i (&codes)[8], const int8_t* x) {
    __m256i odd = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int k = 0; k < 8; k += 2) {
      dots = dpbssd(dots, codes[k], x_dword(x + 4 * k));
      odd = dpbssd(odd, codes[k + 1], x_dword(x + 4 * k + 4));
    }
    return _mm256_add_epi32(dots, odd);
  }
};

#include "int8_linear_ymm.h"
#include "int8_linear_tile.h"

}  // namespace

extern "C" void mlspec_mxfp4_linear_int8_avxvnniint8(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Mxfp4>(*args, begin, end);
}

extern "C" void mlspec_nested_linear_int8_avxvnniint8(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Nested>(*args, begin, end);
}

extern "C" void mlspec_int4_linear_int8_avxvnniint8(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Int4>(*args, begin, end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
