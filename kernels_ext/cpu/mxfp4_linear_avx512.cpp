// MXFP4 linear with AVX-512 (F, BW, DQ, VL): sixteen codes are sixteen indices of one vpermps into the scaled table.
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "../formats.h"
#include "kernels.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own _mm512_undefined_ps (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

namespace {
using namespace mlspec;

struct Vec {
  __m512 v;
  // 4 x 6 sums, two decoded weights and the table are 27 of 32 registers; at one x row, 4 independent sums hide the
  // latency of a block's two FMAs. Wider tiles of fewer weight rows (3 x 9) read x too often from L2: measured slower.
  static constexpr int kMaxCols = 6;
  static constexpr int rows_for(int) { return 4; }
  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static __m256 upper_half(__m512 v) { return _mm512_castps512_ps256(_mm512_shuffle_f32x4(v, v, 0x0E)); }
  static float sum(Vec a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  struct Decoder {
    __m512 scaled;
    explicit Decoder(const float* scale) : scaled(_mm512_mul_ps(_mm512_loadu_ps(kE2M1), _mm512_set1_ps(*scale))) {}
    void decode(const uint8_t* bytes, Vec& even, Vec& odd) const {  // vpermps reads the low 4 bits of an index only
      const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
      even.v = _mm512_permutexvar_ps(index, scaled);
      odd.v = _mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), scaled);
    }
  };
};

#include "mxfp4_linear_tile.h"

}  // namespace

extern "C" void mlspec_split_x_avx512(const void* x, mlspec_dtype dtype, int64_t in_features, int64_t row_begin,
                                      int64_t row_end, float* out) {
  split_x(x, dtype, in_features, row_begin, row_end, out);
}

extern "C" void mlspec_mxfp4_linear_avx512(const mlspec_mxfp4_linear_args* args, int64_t begin, int64_t end) {
  linear(*args, begin, end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
