// Bit-planes times bfloat16 activations with AVX2 and FMA: codes become digits of floats, eight outputs at a time.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace {

#include "../tile_rows.h"
#include "planes_linear_codes.h"
#include "planes_linear_nibbles.h"
#include "planes_linear_fields.h"

struct Ymm {
  using Float = __m256;
  using Int = __m256i;

  static Float set(float scalar) { return _mm256_set1_ps(scalar); }
  static Float subtract(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Int load_plane(const uint8_t* block) { return _mm256_loadu_si256((const __m256i*)block); }
  static Int shift_left(Int v, int count) { return _mm256_sll_epi16(v, _mm_cvtsi32_si128(count)); }
  template <int k>
  static Int shift_left(Int v) {
    return _mm256_slli_epi16(v, k);
  }
  template <int k>
  static Int shift_right(Int v) {
    return _mm256_srli_epi16(v, k);
  }
  template <int mask>
  static Int choose(Int a, Int b) {
    const Int chosen = _mm256_set1_epi16(static_cast<int16_t>(mask));
    return _mm256_or_si256(_mm256_and_si256(chosen, a), _mm256_andnot_si256(chosen, b));
  }
  template <int k, int mask>
  static void exchange(Int& a, Int& b) {
    const Int kept = _mm256_set1_epi16(static_cast<int16_t>(mask));
    const Int different = _mm256_andnot_si256(kept, _mm256_xor_si256(a, shift_right<k>(b)));
    a = _mm256_xor_si256(a, different);
    b = _mm256_xor_si256(b, shift_left<k>(different));
  }
  template <int k>
  static Int word_left(Int v) {
    return _mm256_slli_epi32(v, k);
  }
  template <int k>
  static Int word_right(Int v) {
    return _mm256_srli_epi32(v, k);
  }
  static Int word(uint32_t bits) { return _mm256_set1_epi32(static_cast<int32_t>(bits)); }
  static Float digits(Int v, Int mask, Int power) {
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(v, mask), power));
  }
};

struct Isa {
  using Float = __m256;
  static constexpr int kVectors = 2, kMaxTokens = 9;
  static constexpr int tiles_for(int tokens, int) { return tokens == 1 ? 2 : 1; }

  static Float zeros() { return _mm256_setzero_ps(); }
  static Float set(float scalar) { return _mm256_set1_ps(scalar); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float load_float16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }

  template <int N>
  struct Tokens {
    alignas(32) float x[N][32];
    void load(const uint16_t* block, int64_t row_stride) {
      for (int t = 0; t < N; ++t) {
        for (int k = 0; k < 32; k += 8) {
          const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(block + t * row_stride + k)));
          _mm256_store_si256((__m256i*)&x[t][k], _mm256_slli_epi32(words, 16));
        }
      }
    }
  };

  template <int kParts>
  using Unpack = UnpackFields<Ymm, kParts>;

  template <int kParts, int N>
  static inline __attribute__((always_inline)) void add_block(const Unpack<kParts>& unpack, const uint8_t* block,
                                                              const Tokens<N>& tokens, Float (&dots)[N]) {
    unpack.columns(block, [&](int k, Float column) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) dots[t] = fma(column, set(tokens.x[t][k]), dots[t]);
    });
  }
};

#include "planes_linear_tile.h"

}  // namespace

extern "C" void mlspec_bitplane_linear_avx2(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  bitplane_linear(*args, out_begin, out_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
