// Lookup-table planes times bfloat16 activations with AVX2 and FMA: two outputs a register, byte shuffles are their tables.
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

#include "lut_linear_tile.h"
#include "../planes/planes_linear_nibbles.h"
#include "../planes/planes_linear_ymm.h"

constexpr int kPairs = 8;       // of outputs in a tile; each half of a register belongs to one of two
constexpr int kMaxTokens = 6;   // twice as many sums of a pair leave registers for what is looked up
constexpr int kNibble = 4;      // planes that 16 bytes of a shuffle tell apart
constexpr int kVectors = 8;     // of 16 numbers in bytes, in a step of one output

// Eight values of a table, rounded to bfloat16, which is left in the upper halves.
inline __m256i rounded(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
}

inline __m256i eight_values(const uint16_t* from) { return rounded(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from))); }

// A step of N tokens as floats, in the order in which numbers leave the planes: [vector][4 quarters][4], where element k of
// quarter f in vector v is input 32 (f / 2 * 2 + k / 2) + 4 v + 2 (f % 2) + k % 2 of the step.
template <int N>
struct StepTokens {
  alignas(32) float x[N][kStep];

  void load(const uint16_t* from, int64_t stride, int64_t elements) {
    for (int t = 0; t < N; ++t, from += stride) {
      if (elements >= kStep) {
        order(from, x[t]);
      } else {
        alignas(32) uint16_t whole[kStep] = {};
        std::memcpy(whole, from, elements * 2);
        order(whole, x[t]);
      }
    }
  }

 private:
  static __m256d widen(const uint16_t* from) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    return _mm256_castsi256_pd(_mm256_slli_epi32(words, 16));
  }
  static void order(const uint16_t* from, float* to) {
    for (int v = 0; v < kVectors; v += 2) {
      for (int half = 0; half < 2; ++half) {
        const __m256d a = widen(from + 64 * half + 4 * v), b = widen(from + 64 * half + 32 + 4 * v);
        const __m256d even = _mm256_unpacklo_pd(a, b), odd = _mm256_unpackhi_pd(a, b);
        _mm256_store_pd((double*)(to + 16 * v + 8 * half), _mm256_permute2f128_pd(even, odd, 0x20));
        _mm256_store_pd((double*)(to + 16 * (v + 1) + 8 * half), _mm256_permute2f128_pd(even, odd, 0x31));
      }
    }
  }
};

// Up to four planes: the low and the high bytes of 16 values are two tables of a shuffle.
struct ByShuffle {
  static constexpr int kTiles = 4;
  alignas(32) uint8_t low[kPairs][32], high[kPairs][32];
  __m256i mask;

  void load(const mlspec_linear_args& a, int64_t tile) {
    const int64_t count = int64_t{1} << a.num_planes;
    mask = _mm256_set1_epi8(static_cast<char>(count - 1));
    for (int row = 0; row < 16; ++row) {
      alignas(32) uint16_t values[16] = {};
      std::memcpy(values, table_of(a, tile, row), count * 2);
      const __m256i first = _mm256_srli_epi32(eight_values(values), 16), second = _mm256_srli_epi32(eight_values(values + 8), 16);
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);  // 16 in their order
      const __m256i lower = _mm256_and_si256(words, _mm256_set1_epi16(255)), upper = _mm256_srli_epi16(words, 8);
      const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(lower, upper), 0xD8);
      _mm_store_si128((__m128i*)(low[row / 2] + row % 2 * 16), _mm256_castsi256_si128(bytes));
      _mm_store_si128((__m128i*)(high[row / 2] + row % 2 * 16), _mm256_extracti128_si256(bytes, 1));
    }
  }

  // Sums of a pair: four partial ones of each output, apart for even and odd quarters.
  template <int N>
  struct Sums {
    __m256 part[kPairs][2][N];

    float of(int row, int t) const {
      alignas(32) float parts[8];
      _mm256_store_ps(parts, _mm256_add_ps(part[row / 2][0][t], part[row / 2][1][t]));
      const float* const own = parts + row % 2 * 4;
      return (own[0] + own[2]) + (own[1] + own[3]);
    }
  };

  template <int N>
  __attribute__((always_inline)) void add(int pair, const uint8_t* planes, int64_t plane_bytes, int count,
                                          const float* x, Sums<N>& sums) const {
    const __m256i lower = _mm256_load_si256((const __m256i*)low[pair]), upper = _mm256_load_si256((const __m256i*)high[pair]);
    const __m256i odd = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
    asm("" : "+r"(x));  // GCC would keep every address of a step in memory, to load it for each product
    __m256i codes[4];
    nibbles<YmmBits>(planes, plane_bytes, count, codes);
    __m256 acc[2][N];
    for (int f = 0; f < 2; ++f) for (int t = 0; t < N; ++t) acc[f][t] = sums.part[pair][f][t];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const __m256i numbers = _mm256_and_si256(v % 2 ? _mm256_srli_epi16(codes[v / 2], 4) : codes[v / 2], mask);
      const __m256i l = _mm256_shuffle_epi8(lower, numbers), h = _mm256_shuffle_epi8(upper, numbers);
      const __m256i first = _mm256_unpacklo_epi8(l, h), second = _mm256_unpackhi_epi8(l, h);
      const __m256i values[4] = {_mm256_slli_epi32(first, 16), _mm256_and_si256(first, odd), _mm256_slli_epi32(second, 16),
                                 _mm256_and_si256(second, odd)};
#pragma GCC unroll 4
      for (int f = 0; f < 4; ++f) {
#pragma GCC unroll 6
        for (int t = 0; t < N; ++t) {
          const __m256 four = _mm256_broadcast_ps((const __m128*)(x + t * kStep + 16 * v + 4 * f));
          acc[f % 2][t] = _mm256_fmadd_ps(_mm256_castsi256_ps(values[f]), four, acc[f % 2][t]);
        }
      }
    }
    for (int f = 0; f < 2; ++f) for (int t = 0; t < N; ++t) sums.part[pair][f][t] = acc[f][t];
  }
};

// Five planes and more: gathers from floats, of each output by itself.
struct ByGather {
  static constexpr int kTiles = 1;  // of 16 KB of tables
  alignas(32) float table[2 * kPairs][1 << kMaxPlanes];

  void load(const mlspec_linear_args& a, int64_t tile) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000u));
    for (int row = 0; row < 2 * kPairs; ++row) {
      const uint16_t* const from = table_of(a, tile, row);
      for (int number = 0; number < 1 << a.num_planes; number += 8)
        _mm256_store_si256((__m256i*)(table[row] + number), _mm256_and_si256(eight_values(from + number), upper));
    }
  }

  template <int N>
  struct Sums {
    __m256 part[2 * kPairs][N];

    float of(int row, int t) const {
      alignas(32) float s[8];
      _mm256_store_ps(s, part[row][t]);
      return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
    }
  };

  template <int N>
  __attribute__((always_inline)) void add(int pair, const uint8_t* planes, int64_t plane_bytes, int count,
                                          const float* x, Sums<N>& sums) const {
    alignas(32) uint8_t numbers[kVectors][32];
    bytes(planes, plane_bytes, count, numbers);
    for (int row = 0; row < 2; ++row) {
      const float* const own = table[2 * pair + row];
      __m256 acc[N];
      for (int t = 0; t < N; ++t) acc[t] = sums.part[2 * pair + row][t];
      for (int i = 0; i < 2 * kVectors; ++i) {
        const __m128i eight = _mm_loadl_epi64((const __m128i*)(numbers[i / 2] + 16 * row + i % 2 * 8));
        const __m256 values = _mm256_i32gather_ps(own, _mm256_cvtepu8_epi32(eight), 4);
#pragma GCC unroll 6
        for (int t = 0; t < N; ++t) acc[t] = _mm256_fmadd_ps(values, _mm256_load_ps(x + t * kStep + 8 * i), acc[t]);
      }
      for (int t = 0; t < N; ++t) sums.part[2 * pair + row][t] = acc[t];
    }
  }

 private:
  // Numbers of a pair's step, in the order of the tokens: those of a quarter are two bytes apart.
  static void bytes(const uint8_t* planes, int64_t plane_bytes, int count, uint8_t (*to)[32]) {
    const __m256i quarters = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m256i mask = _mm256_set1_epi8(static_cast<char>((1 << count) - 1));
    const __m128i unused = _mm_cvtsi32_si128(kMaxPlanes - count);
    __m256i upper[4], lower[4];
    nibbles<YmmBits>(planes, plane_bytes, kNibble, upper);
    nibbles<YmmBits>(planes + kNibble * plane_bytes, plane_bytes, count - kNibble, lower);
    for (int s = 0; s < 4; ++s) {
      lower[s] = YmmBits::shift_left(lower[s], kMaxPlanes - count);
      YmmBits::exchange<4, 0xF0F0>(upper[s], lower[s]);
      const __m256i even = _mm256_and_si256(_mm256_srl_epi16(lower[s], unused), mask);
      const __m256i odd = _mm256_and_si256(_mm256_srl_epi16(upper[s], unused), mask);
      _mm256_store_si256((__m256i*)to[2 * s], _mm256_shuffle_epi8(even, quarters));
      _mm256_store_si256((__m256i*)to[2 * s + 1], _mm256_shuffle_epi8(odd, quarters));
    }
  }
};

// Of a plane, between what is read and what is fetched: several streams of planes share the L1 cache.
constexpr int64_t kAhead = 1024;

// T tiles times N tokens: what it takes to order the tokens of a step, T tiles share.
template <class Lookup, int T, int N>
void multiply(const mlspec_linear_args& a, const Lookup* lookups, int64_t tile, int64_t token) {
  const uint16_t* const x = static_cast<const uint16_t*>(a.acts->data) + token * a.in_features;
  const int count = static_cast<int>(a.num_planes);
  StepTokens<N> tokens;
  typename Lookup::template Sums<N> sums[T];
  std::memset(&sums, 0, sizeof sums);
  const Steps steps(a);
  for (int64_t s = 0; s < steps.count; ++s) {
    tokens.load(x + s * kStep, a.in_features, a.in_features - s * kStep);
    for (int i = 0; i < T; ++i) {
      alignas(32) uint8_t last[kMaxPlanes * kStepBytes];
      int64_t plane_bytes;
      const uint8_t* const step = steps.at(a, tile + i, s, last, &plane_bytes);
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint8_t* const planes = step + pair * 2 * kRowBytes;
        if (pair % 2 == 0) for (int plane = 0; plane < count; ++plane) __builtin_prefetch(planes + plane * plane_bytes + kAhead);
        lookups[i].template add<N>(pair, planes, plane_bytes, count, &tokens.x[0][0], sums[i]);
      }
    }
  }
  for (int i = 0; i < T; ++i) {
    alignas(64) float result[N][kTileOutputs];
    for (int t = 0; t < N; ++t) for (int row = 0; row < kTileOutputs; ++row) result[t][row] = sums[i].of(row, t);
    add_rows(a, tile + i, token, N, result);
  }
}

template <class Lookup>
using TileFunction = void (*)(const mlspec_linear_args&, const Lookup*, int64_t tile, int64_t token);

template <class Lookup, int T, int... N>
constexpr auto widths(std::integer_sequence<int, N...>) {
  return std::array<TileFunction<Lookup>, sizeof...(N)>{multiply<Lookup, T, N + 1>...};
}

// Tokens are cut into near-equal parts, each of which looks the weights up again while they lie in the cache.
template <class Lookup, int T>
int64_t multiply_tiles(const mlspec_linear_args& a, int64_t tile, int64_t tile_end) {
  static constexpr auto kWidths = widths<Lookup, T>(std::make_integer_sequence<int, kMaxTokens>());
  const int64_t tokens = a.acts->num_rows, parts = (tokens + kMaxTokens - 1) / kMaxTokens;
  Lookup lookups[T];
  for (; tile + T <= tile_end; tile += T) {
    for (int i = 0; i < T; ++i) lookups[i].load(a, tile + i);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * tokens / parts, end = (part + 1) * tokens / parts;
      kWidths[end - begin - 1](a, lookups, tile, begin);
    }
  }
  return tile;
}

template <class Lookup>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs;
  int64_t tile = out_begin / kTileOutputs;
  if constexpr (Lookup::kTiles > 1) tile = multiply_tiles<Lookup, Lookup::kTiles>(a, tile, tile_end);
  multiply_tiles<Lookup, 1>(a, tile, tile_end);
}

inline void lut_linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  if (a.num_planes > kNibble) return linear<ByGather>(a, out_begin, out_end);
  linear<ByShuffle>(a, out_begin, out_end);
}

}  // namespace

MLSPEC_LINEAR(lut_linear_avx2, lut_linear)

MLSPEC_TARGET_END
