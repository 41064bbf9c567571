// 4-bit weights times int8 activations with AVX-VNNI-INT8: vpdpbssd takes signed codes, so E2M1 needs no correction.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

// GCC knows the instruction from 13 on (the name before that is unknown to its target pragma), Clang from 16 on.
#if (defined(__clang__) && __clang_major__ >= 16) || (!defined(__clang__) && __GNUC__ >= 13)
#define MLSPEC_HAS_DPBSSD
#endif

#if defined(MLSPEC_HAS_DPBSSD)
MLSPEC_TARGET("avx2,fma,f16c,avxvnniint8")
#else
MLSPEC_TARGET("avx2,fma,f16c")
#endif

namespace {

#include "int8_linear_chains.h"

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

struct Dot : TwoChains<Dot> {
  static constexpr bool kSigned = true;
  static __m256i add(__m256i sum, __m256i codes, __m256i x) { return dpbssd(sum, codes, x); }
};

#include "int8_linear_ymm.h"
#include "int8_linear_tile.h"

}  // namespace

MLSPEC_INT8_LINEARS(avxvnniint8)

MLSPEC_TARGET_END
