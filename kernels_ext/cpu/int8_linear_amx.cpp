// 4-bit weights times int8 activations with AMX: tdpbsud multiplies up to 16 tokens by 16 outputs.
//
// The caller's process holds the permission for tile data. Integers are exact, so few tokens stay with vpdpbusd.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own _mm512_undefined_epi32 (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c,amx-tile,amx-int8"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c,amx-tile,amx-int8")
#endif

namespace {

#define MLSPEC_INT8_VBMI
#define MLSPEC_INT8_MATRIX 1
#include "int8_linear_zmm.h"
#include "int8_linear_tile.h"

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Tile registers: 0 and 1 dots [N][16 int32], 2 and 3 x [N][32], 4 and 5 codes [8][16][4]
template <int N>
class TileScope {
 public:
  TileScope() {
    TileConfig config;
    for (int i = 0; i < 6; ++i) {
      config.bytes_per_row[i] = i / 2 == 1 ? 32 : 64;
      config.rows[i] = i / 2 == 2 ? 8 : N;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic reads 8 of its 64 bytes as far as the optimizer knows
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
};

template <class Format>
inline void unpack_block(const Isa::Unpack<Format>& unpack, const uint8_t* weight, uint8_t* codes) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i bytes = _mm512_loadu_si512(weight + 64 * j);
    _mm512_store_si512(codes + 128 * j, unpack.low(bytes));
    _mm512_store_si512(codes + 128 * j + 64, unpack.high(bytes));
  }
}

constexpr int kChunkBlocks = 8;  // unpacked, multiplied and scaled in turn: hides tdpbsud's latency of 52

// Exact dots of a group's blocks: dots[N][16]. The intrinsics want literal register numbers; odd groups use other
// registers, so that neighbours overlap.
#define MLSPEC_GROUP_DOTS(name, kDots, kX, kCodes)                                                  \
  template <int N>                                                                                  \
  inline void name(const int8_t* x, const uint8_t* codes, int64_t group_blocks, int32_t* dots) {    \
    _tile_zero(kDots);                                                                              \
    for (int64_t b = 0; b < group_blocks; ++b) {                                                    \
      _tile_loadd(kX, x + b * N * kBlockCodes, 32);                                                 \
      _tile_loadd(kCodes, codes + b * 512, 64);                                                     \
      _tile_dpbsud(kDots, kX, kCodes);                                                              \
    }                                                                                               \
    _tile_stored(kDots, dots, 64);                                                                  \
  }
MLSPEC_GROUP_DOTS(even_group_dots, 0, 2, 4)
MLSPEC_GROUP_DOTS(odd_group_dots, 1, 3, 5)

// The intrinsics do not tell the compiler that they read and write memory.
inline void memory_barrier() { asm volatile("" ::: "memory"); }

template <class Format, int N>
inline __attribute__((always_inline)) void scale_chunk(const mlspec_linear_args& a, const Part& part, int64_t tile,
                                                       int64_t first, int64_t count, const int32_t (*dots)[N][16],
                                                       __m512 (&acc)[N]) {
  const int64_t groups = mlspec_groups(a.acts);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t g = first + i, at = (tile * groups + g) * kTileOutputs;
    const __m512 scale = Format::scale(a, at);
    const __m512i minus_zero = Format::minus_zero(a, at);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) {
      const __m512i correction = _mm512_set1_epi32(part.corrections[g * N + t]);
      const __m512i sum = _mm512_load_si512(dots[i][t]);
      const __m512i exact = part.prepared ? _mm512_add_epi32(sum, correction)
                                          : _mm512_dpwssd_epi32(sum, minus_zero, correction);
      acc[t] = Isa::fma(Isa::to_float(exact), Isa::times(scale, part.scales[g * N + t]), acc[t]);
    }
  }
}

template <class Format, int N>
void matrix_tile(const mlspec_linear_args& a, const Part& part, int64_t tile, int64_t token) {
  const int64_t blocks = a.in_features / kBlockCodes;
  const int64_t group_blocks = Format::blocks_per_group(a), groups = blocks / group_blocks;
  const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + tile * blocks * kTileBlockBytes;
  const Isa::Unpack<Format> unpack;
  alignas(64) uint8_t codes[kChunkBlocks * 512];
  alignas(64) int32_t dots[kChunkBlocks][N][16];
  __m512 acc[1][N];
#pragma GCC unroll 16
  for (int t = 0; t < N; ++t) acc[0][t] = Isa::zeros();
  const int64_t chunk_groups = kChunkBlocks / group_blocks;
  for (int64_t first = 0; first < groups; first += chunk_groups) {
    const int64_t count = std::min(chunk_groups, groups - first);
    for (int64_t b = 0; b < count * group_blocks; ++b, weight += kTileBlockBytes) {
      Isa::prefetch(weight);
      unpack_block<Format>(unpack, weight, codes + b * 512);
    }
    memory_barrier();
    const int8_t* x = part.codes + first * group_blocks * N * kBlockCodes;
    for (int64_t i = 0; i < count; i += 2) {
      const int64_t b = i * group_blocks, next = b + group_blocks;
      even_group_dots<N>(x + b * N * kBlockCodes, codes + b * 512, group_blocks, dots[i][0]);
      if (i + 1 == count) break;
      odd_group_dots<N>(x + next * N * kBlockCodes, codes + next * 512, group_blocks, dots[i + 1][0]);
    }
    memory_barrier();
    scale_chunk<Format, N>(a, part, tile, first, count, dots, acc[0]);
  }
  store_tile<N>(a, tile, token, acc);
}

template <class Format, int N>
void matrix_tiles(const mlspec_linear_args& a, const Part& part, int64_t tile, int64_t tile_end, int64_t token) {
  const TileScope<N> scope;
  for (; tile < tile_end; ++tile) matrix_tile<Format, N>(a, part, tile, token);
}

}  // namespace

extern "C" void mlspec_mxfp4_linear_int8_amx(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Mxfp4>(*args, begin, end);
}

extern "C" void mlspec_int4_linear_int8_amx(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  linear<Int4>(*args, begin, end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
