// Exact product with a nested weight with AVX2 and FMA: weights rebuilt with integers, widened, and float32 FMA.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET("avx2,fma")

namespace {

#include "nested_total.h"

struct Isa {
  using Sum = __m256;
  static constexpr int kVectors = 2, kSums = 8, kMaxTokens = 5;
  // Of 16 registers 8 to 10 sums, two of weights and what widens them.
  static constexpr int sums_for(int tokens) { return tokens == 1 ? 8 : tokens == 2 ? 4 : 2; }

  struct Activations {
    float even[16], odd[16];
  };
  struct Weights {
    __m256 even, odd;
  };
  static Weights widen(__m256i pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))))};
  }
  static void arrange(const uint16_t* x, Activations& to) {
    for (int half = 0; half < 16; half += 8) {
      const Weights wide = widen(_mm256_loadu_si256((const __m256i*)(x + 2 * half)));
      _mm256_store_ps(to.even + half, wide.even);
      _mm256_store_ps(to.odd + half, wide.odd);
    }
  }

  static __m256i words(int value) { return _mm256_set1_epi16(static_cast<int16_t>(value)); }

  // v == 0 ? 0 : v + base, and the top bit of `signs`.
  static __m256i join(__m256i v, __m256i base, __m256i signs) {
    const __m256i is_zero = _mm256_cmpeq_epi16(v, _mm256_setzero_si256());
    return _mm256_or_si256(_mm256_add_epi16(v, _mm256_andnot_si256(is_zero, base)), _mm256_and_si256(signs, words(0x8000)));
  }

  // Eight elements of 8 outputs: four registers of pairs (hf_mlspec/ops/nested/tiles.py).
  static void rebuild_eight(const uint8_t* nibbles, const uint8_t* low, __m256i base, uint32_t (*pairs)[16]) {
    // Bytes 0 1 2 3 of an output in the order 0 2 1 3: words whose nibbles belong to elements (0, 4, 2, 6) and (1, 5, 3, 7).
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    const __m256i signs = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i*)nibbles), order), field = words(0x0FFF);
    const __m256i a = _mm256_loadu_si256((const __m256i*)low), b = _mm256_loadu_si256((const __m256i*)(low + 64));
    const __m256i c = _mm256_loadu_si256((const __m256i*)(low + 128));
    const __m256i middle = _mm256_and_si256(_mm256_srli_epi16(b, 8), words(0x00F0));
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(c, 4), words(0x0F00));
    const __m256i split = _mm256_or_si256(_mm256_or_si256(_mm256_srli_epi16(a, 12), middle), upper);
    _mm256_store_si256((__m256i*)pairs[0], join(_mm256_and_si256(a, field), base, _mm256_slli_epi16(signs, 12)));
    _mm256_store_si256((__m256i*)pairs[1], join(split, base, _mm256_slli_epi16(signs, 4)));
    _mm256_store_si256((__m256i*)pairs[2], join(_mm256_and_si256(b, field), base, _mm256_slli_epi16(signs, 8)));
    _mm256_store_si256((__m256i*)pairs[3], join(_mm256_and_si256(c, field), base, signs));
  }

  static void rebuild(const uint8_t* nibbles, const uint8_t* exponents, const uint8_t* low, uint32_t (*pairs)[16]) {
    for (int v = 0; v < 2; ++v) {
      const __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(exponents + 8 * v)));
      const __m256i both = _mm256_or_si256(byte, _mm256_slli_epi32(byte, 16));
      const __m256i base = _mm256_slli_epi16(_mm256_sub_epi16(both, words(31)), 7);
      for (int j = 0; j < 4; ++j) {
        const auto to = reinterpret_cast<uint32_t(*)[16]>(pairs[4 * j] + 8 * v);
        rebuild_eight(nibbles + 64 * j + 32 * v, low + 192 * j + 32 * v, base, to);
      }
    }
  }

  static Sum load(const float* p) { return _mm256_load_ps(p); }
  static void store(float* p, Sum sum) { _mm256_store_ps(p, sum); }
  static Weights load_pairs(const uint32_t* p) { return widen(_mm256_load_si256((const __m256i*)p)); }
  static Sum fma(const Weights& w, const Activations& x, int pair, Sum sum) {
    const Sum with_even = _mm256_fmadd_ps(w.even, _mm256_broadcast_ss(x.even + pair), sum);
    return _mm256_fmadd_ps(w.odd, _mm256_broadcast_ss(x.odd + pair), with_even);
  }
  static void store_total(const Sum* sums, float* to) { _mm256_store_ps(to, total_of_4(sums) + total_of_4(sums + 4)); }
};

#include "nested_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(nested_linear_exact_avx2, linear)

MLSPEC_TARGET_END
