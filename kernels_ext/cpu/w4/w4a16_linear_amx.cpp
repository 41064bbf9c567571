// 4-bit weights times bfloat16 activations with AMX: rows of x as they lie are A, 32 x 16 unpacked weights are B.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,amx-tile,amx-bf16")

namespace {

#include "w4a16_linear_zmm.h"
using Isa = Zmm;
#include "../tile_streams.h"
#include "w4a16_linear_formats.h"
#include "../amx_registers.h"

template <int kSums, int kX>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kWeights), "i"(kX), "i"(kSums));
}

// Registers for M tiles of tokens, the last of which has `last_rows` rows; sum (i, m) is register i * M + m.
template <int T, int M>
void configure(int last_rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile <= kLastRows; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = kTileRows;
  for (int i = 0; i < T; ++i) config.rows[i * M + M - 1] = static_cast<uint8_t>(last_rows);
  config.rows[kLastRows] = static_cast<uint8_t>(last_rows);
  asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic reads 8 of its 64 bytes as far as the optimizer knows
}

template <class Format, int T, int M>
struct Product {
  const mlspec_linear_args& a;
  const int64_t in, blocks, group_blocks, groups;
  const UnpackPairs<Format> unpack;
  alignas(64) float acc[T][M * kTileRows][kTileOutputs];
  alignas(64) float dots[T * M][kTileRows][kTileOutputs];
  alignas(64) uint16_t pairs[2 * T][kTileRows][2 * kTileOutputs];  // two blocks: one is read while the other is written

  explicit Product(const mlspec_linear_args& args)
      : a(args), in(a.in_features), blocks(in / kBlock), group_blocks(Format::blocks_per_group(a)),
        groups(blocks / group_blocks), unpack(a) {}

  // kCount of the T tiles of outputs times `rows` tokens, over all of in_features. Blocks are unpacked one ahead: a tile
  // load waits until what was stored there has left the store buffer.
  template <int kCount>
  void run(int64_t tile, int64_t token, int rows) {
    for (int i = 0; i < kCount; ++i) std::memset(acc[i], 0, rows * sizeof acc[i][0]);
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + tile * blocks * kTileBytes;
    const uint16_t* x = static_cast<const uint16_t*>(a.acts->data) + token * in;
    const TileStreams streams(blocks * kTileBytes, kCount);
    for (int i = 0; i < kCount; ++i) unpack_block(tile + i, 0, weight + i * streams.tile_bytes, streams.ahead, pairs[i]);
    int64_t block = 0;
    for (int64_t g = 0; g < groups; ++g) {
      clear_sums<0, kCount * M>();
      for (int64_t b = 1; b <= group_blocks; ++b, x += kBlock) {
        const int64_t next = std::min(++block, blocks - 1);  // the last block is unpacked twice
        const int64_t next_group = b < group_blocks || block == blocks ? g : g + 1;
        add_block<0, kCount>(tile, next_group, weight, next * kTileBytes, streams, x, block % 2);
      }
      add_group<0, kCount>(tile, g, rows);
    }
    for (int i = 0; i < kCount; ++i) add_rows(a, tile + i, token, rows, acc[i]);
  }

  inline void unpack_block(int64_t tile, int64_t g, const uint8_t* bytes, int64_t ahead,
                           uint16_t (*to)[2 * kTileOutputs]) const {
    Isa::prefetch(bytes + ahead);
    Isa::Zeros zeros;
    if constexpr (Format::kHasZeros) zeros = Isa::load_zeros(a.zero + (tile * groups + g) * kTileOutputs);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i row[4];
      unpack.row(bytes + 64 * j, zeros, row);
#pragma GCC unroll 4
      for (int p = 0; p < 4; ++p) _mm512_store_si512(to[4 * j + p], row[p]);
    }
  }

  template <int kSum, int kEnd>
  void clear_sums() {
    if constexpr (kSum < kEnd) clear<kSum>(), clear_sums<kSum + 1, kEnd>();
  }

  // Unpacks the next block, at byte `offset` of every tile, into the half `next_half` of the buffer and multiplies the
  // other half by x.
  template <int i, int kCount>
  inline void add_block(int64_t tile, int64_t next_group, const uint8_t* weight, int64_t offset, const TileStreams& streams,
                        const uint16_t* x, int next_half) {
    if constexpr (i < kCount) {
      const uint8_t* const next = weight + i * streams.tile_bytes + offset;
      unpack_block(tile + i, next_group, next, streams.distance(offset), pairs[next_half * T + i]);
      load<kWeights>(pairs[(1 - next_half) * T + i], 64);
      if constexpr (M == 2) {
        if constexpr (i == 0) load<kFullRows>(x, in * 2);
        multiply_add<i * M, kFullRows>();
      }
      if constexpr (i == 0) load<kLastRows>(x + (M - 1) * kTileRows * in, in * 2);
      multiply_add<i * M + M - 1, kLastRows>();
      add_block<i + 1, kCount>(tile, next_group, weight, offset, streams, x, next_half);
    }
  }

  template <int i, int kCount>
  inline void add_group(int64_t tile, int64_t g, int rows) {
    if constexpr (i < kCount) {
      if constexpr (M == 2) store<i * M>(dots[i * M], 64);
      store<i * M + M - 1>(dots[i * M + M - 1], 64);
      const __m512 scale = Format::scale(a, ((tile + i) * groups + g) * kTileOutputs);
      const float* sums = dots[i * M][0];
      for (int t = 0; t < rows; ++t) {
        const __m512 sum = _mm512_load_ps(sums + t * kTileOutputs);
        _mm512_store_ps(acc[i][t], _mm512_fmadd_ps(sum, scale, _mm512_load_ps(acc[i][t])));
      }
      add_group<i + 1, kCount>(tile, g, rows);
    }
  }
};

template <class Format, int T, int M>
void multiply(const mlspec_linear_args& a, int64_t tile, int64_t tile_end, int64_t token, int rows) {
  configure<T, M>(rows - (M - 1) * kTileRows);
  Product<Format, T, M> product(a);
  for (; tile + T <= tile_end; tile += T) product.template run<T>(tile, token, rows);
  for (; tile < tile_end; ++tile) product.template run<1>(tile, token, rows);
}

// Tokens in parts of at most 32. A panel of outputs stays in L2 while the parts pass.
template <class Format>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  constexpr int64_t kPanelBytes = 256 * 1024, kPart = 2 * kTileRows;
  const int64_t tokens = a.acts->num_rows, tile_bytes = a.in_features / kBlock * kTileBytes;
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs;
  const int64_t panel = tokens <= kPart ? tile_end : std::max<int64_t>(4, kPanelBytes / tile_bytes / 4 * 4);
  for (int64_t tile = out_begin / kTileOutputs; tile < tile_end; tile += panel) {
    const int64_t end = std::min(tile + panel, tile_end);
    for (int64_t token = 0; token < tokens; token += kPart) {
      const int rows = static_cast<int>(std::min(tokens - token, kPart));
      if (rows > kTileRows) {
        multiply<Format, 2, 2>(a, tile, end, token, rows);
      } else {
        multiply<Format, 4, 1>(a, tile, end, token, rows);
      }
    }
  }
  _tile_release();
}

inline void int4_linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  if (a.zero) return linear<Int4<true>>(a, out_begin, out_end);
  linear<Int4<false>>(a, out_begin, out_end);
}

}  // namespace

MLSPEC_W4A16_LINEARS(amx)

MLSPEC_TARGET_END
