// Bit-planes times bfloat16 activations with AMX: rows of x as they lie are A, 32 x 16 unpacked weights are B.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own _mm512_undefined_epi32 (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,amx-tile,amx-bf16")
#endif

namespace {

#include "tile_rows.h"
#include "tile_streams.h"
#include "bitplane_linear_codes.h"
#include "bitplane_linear_nibbles.h"
#include "bitplane_linear_zmm.h"
#include "bitplane_linear_pairs.h"
#include "amx_registers.h"

constexpr int part_register(int part) { return part == 0 ? kWeights : kLastRows + 1; }

template <int kSums, int kX, int kPart>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(part_register(kPart)), "i"(kX), "i"(kSums));
}

// Registers for M tiles of tokens, the last of which has `last_rows` rows; sum (i, m) is register i * M + m.
template <int T, int M>
void configure(int last_rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  for (int i = 0; i < T; ++i) config.rows[i * M + M - 1] = static_cast<uint8_t>(last_rows);
  config.rows[kLastRows] = static_cast<uint8_t>(last_rows);
  asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic reads 8 of its 64 bytes as far as the optimizer knows
}

// T tiles of outputs times M tiles of tokens; kParts: planes in parts of four, each an operand B of its own.
template <int kParts, int T, int M>
struct Product {
  const mlspec_linear_args& a;
  const int64_t in, blocks, group_blocks, groups;
  const UnpackPairs parts[2];
  alignas(64) float acc[T][M * kTileRows][kTileOutputs];
  alignas(64) float dots[T * M][kTileRows][kTileOutputs];
  alignas(64) uint16_t pairs[2][T][kParts][kTileRows][2 * kTileOutputs];  // a block is read while the next one is written

  explicit Product(const mlspec_linear_args& args)
      : a(args), in(a.in_features), blocks(in / kBlockCodes), group_blocks(a.group / kBlockCodes),
        groups(blocks / group_blocks), parts{{a, 0}, {a, 1}} {}

  // kCount of the T tiles of outputs times `rows` tokens, over all of in_features. Blocks are unpacked one ahead: a tile
  // load waits until what was stored there has left the store buffer.
  template <int kCount>
  void run(int64_t tile, int64_t token, int rows) {
    for (int i = 0; i < kCount; ++i) std::memset(acc[i], 0, rows * sizeof acc[i][0]);
    const TileStreams streams(blocks * kPlaneBlockBytes, kCount, prefetch_distance(a));
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + tile * streams.tile_bytes;
    const uint16_t* x = static_cast<const uint16_t*>(a.acts->data) + token * in;
    for (int i = 0; i < kCount; ++i) unpack_block(weight + i * streams.tile_bytes, streams.ahead, pairs[0][i]);
    int64_t block = 0;
    for (int64_t g = 0; g < groups; ++g) {
      clear_sums<0, kCount * M>();
      for (int64_t b = 0; b < group_blocks; ++b, x += kBlockCodes) {
        const int64_t next = std::min(++block, blocks - 1) * kPlaneBlockBytes;  // the last block is unpacked twice
        add_block<0, kCount>(weight + next, streams.distance(next), streams.tile_bytes, x, block % 2);
      }
      add_group<0, kCount>(tile, g, rows);
    }
    for (int i = 0; i < kCount; ++i) add_rows(a, tile + i, token, rows, acc[i]);
  }

  inline void unpack_block(const uint8_t* block, int64_t ahead, uint16_t (*to)[kTileRows][2 * kTileOutputs]) const {
    prefetch_planes(a, block + ahead);
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      parts[i].pairs(block, [&](int p, __m512i pair) __attribute__((always_inline)) { _mm512_store_si512(to[i][p], pair); });
    }
  }

  template <int kSum, int kEnd>
  void clear_sums() {
    if constexpr (kSum < kEnd) clear<kSum>(), clear_sums<kSum + 1, kEnd>();
  }

  // Unpacks the block at `next` of every tile into pairs[half] and multiplies the other half by x.
  template <int i, int kCount>
  inline void add_block(const uint8_t* next, int64_t ahead, int64_t tile_bytes, const uint16_t* x, int half) {
    if constexpr (i < kCount) {
      unpack_block(next, ahead, pairs[half][i]);
      if constexpr (i == 0) {
        if constexpr (M == 2) load<kFullRows>(x, in * 2);
        load<kLastRows>(x + (M - 1) * kTileRows * in, in * 2);
      }
      add_part<i, 0>(pairs[1 - half][i]);
      add_block<i + 1, kCount>(next + tile_bytes, ahead, tile_bytes, x, half);
    }
  }

  template <int i, int kPart>
  inline void add_part(const uint16_t (*weights)[kTileRows][2 * kTileOutputs]) {
    if constexpr (kPart < kParts) {
      load<part_register(kPart)>(weights[kPart], 64);
      if constexpr (M == 2) multiply_add<i * M, kFullRows, kPart>();
      multiply_add<i * M + M - 1, kLastRows, kPart>();
      add_part<i, kPart + 1>(weights);
    }
  }

  template <int i, int kCount>
  inline void add_group(int64_t tile, int64_t g, int rows) {
    if constexpr (i < kCount) {
      if constexpr (M == 2) store<i * M>(dots[i * M], 64);
      store<i * M + M - 1>(dots[i * M + M - 1], 64);
      const uint16_t* scales = static_cast<const uint16_t*>(a.scale) + ((tile + i) * groups + g) * kTileOutputs;
      const __m512 scale = Zmm::load_float16(scales);
      const float* sums = dots[i * M][0];
      for (int t = 0; t < rows; ++t) {
        const __m512 sum = _mm512_load_ps(sums + t * kTileOutputs);
        _mm512_store_ps(acc[i][t], _mm512_fmadd_ps(sum, scale, _mm512_load_ps(acc[i][t])));
      }
      add_group<i + 1, kCount>(tile, g, rows);
    }
  }
};

template <int kParts, int T, int M>
void multiply(const mlspec_linear_args& a, int64_t tile, int64_t tile_end, int64_t token, int rows) {
  configure<T, M>(rows - (M - 1) * kTileRows);
  Product<kParts, T, M> product(a);
  for (; tile + T <= tile_end; tile += T) product.template run<T>(tile, token, rows);
  for (; tile < tile_end; ++tile) product.template run<1>(tile, token, rows);
}

// Tokens in parts of at most 32. A panel of outputs stays in L2 while the parts pass.
template <int kParts>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  constexpr int64_t kPanelBytes = 256 * 1024, kPart = 2 * kTileRows;
  const int64_t tokens = a.acts->num_rows, tile_bytes = a.in_features / kBlockCodes * kPlaneBlockBytes * a.num_planes;
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs;
  const int64_t panel = tokens <= kPart ? tile_end : std::max<int64_t>(4, kPanelBytes / tile_bytes / 4 * 4);
  for (int64_t tile = out_begin / kTileOutputs; tile < tile_end; tile += panel) {
    const int64_t end = std::min(tile + panel, tile_end);
    for (int64_t token = 0; token < tokens; token += kPart) {
      const int rows = static_cast<int>(std::min(tokens - token, kPart));
      if (rows > kTileRows) {
        multiply<kParts, 2, 2>(a, tile, end, token, rows);
      } else {
        multiply<kParts, 4, 1>(a, tile, end, token, rows);
      }
    }
  }
  _tile_release();
}

}  // namespace

extern "C" void mlspec_bitplane_linear_amx(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  if (args->num_planes > kNibblePlanes) return linear<2>(*args, out_begin, out_end);
  linear<1>(*args, out_begin, out_end);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
