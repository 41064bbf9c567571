// Bit-planes times bfloat16 activations with AVX2 and FMA: codes become digits of floats, eight outputs at a time.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma,f16c")

namespace {

#include "../tile_rows.h"
#include "../tokens.h"
#include "../tokens_ymm.h"
#include "planes_linear_codes.h"
#include "planes_linear_nibbles.h"
#include "planes_linear_ymm.h"
#include "planes_linear_fields.h"

struct Ymm : YmmBits {
  using Float = __m256;

  static Float set(float scalar) { return _mm256_set1_ps(scalar); }
  static Float subtract(Float a, Float b) { return _mm256_sub_ps(a, b); }
  template <int k> static Int word_left(Int v) { return _mm256_slli_epi32(v, k); }
  template <int k> static Int word_right(Int v) { return _mm256_srli_epi32(v, k); }
  static Int word(uint32_t bits) { return _mm256_set1_epi32(static_cast<int32_t>(bits)); }
  static Float digits(Int v, Int mask, Int power) {
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(v, mask), power));
  }
};

struct Isa : ByColumns<Isa, Ymm, WidenYmm> {
  using Float = __m256;
  static constexpr int kVectors = 2, kMaxTokens = 9;
  static constexpr int tiles_for(int tokens, int) { return tokens == 1 ? 2 : 1; }

  static Float zeros() { return _mm256_setzero_ps(); }
  static Float set(float scalar) { return _mm256_set1_ps(scalar); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float load_float16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
};

#include "planes_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(bitplane_linear_avx2, bitplane_linear)

MLSPEC_TARGET_END
