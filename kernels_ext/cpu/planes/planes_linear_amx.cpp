// Bit-planes times bfloat16 activations with AMX: rows of x as they lie are A, 32 x 16 unpacked weights are B.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,amx-tile,amx-bf16")

namespace {

#include "../tile_rows.h"
#include "../tile_streams.h"
#include "planes_linear_codes.h"
#include "planes_linear_nibbles.h"
#include "planes_linear_zmm.h"
#include "planes_linear_pairs.h"
#include "../amx_registers.h"

constexpr int part_register(int part) { return part == 0 ? kWeights : kLastRows + 1; }

template <int kSums, int kX, int kPart>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(part_register(kPart)), "i"(kX), "i"(kSums));
}

// The register that sums tile i of outputs, tile m of tokens and a part; parts apart, so that their chains are shorter.
template <int kParts, int M>
constexpr int sum_register(int i, int m, int part) {
  return (i * M + m) * kParts + part;
}

// Registers for M tiles of tokens, the last of which has `last_rows` rows.
template <int kParts, int T, int M>
void configure(int last_rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  for (int i = 0; i < T * kParts; ++i) {
    config.rows[sum_register<kParts, M>(i / kParts, M - 1, i % kParts)] = static_cast<uint8_t>(last_rows);
  }
  config.rows[kLastRows] = static_cast<uint8_t>(last_rows);
  asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic reads 8 of its 64 bytes as far as the optimizer knows
}

// T tiles of outputs times M tiles of tokens; kParts: planes in parts of four, each an operand B of its own. T is small: planes
// of many tiles are so many streams through the same sets of the L1 cache that they push each other out.
template <int kParts, int M>
struct Product {
  static constexpr int T = 2 / kParts, kAhead = 2, kBuffers = 2 * kAhead;  // kAhead in blocks, see run()
  const mlspec_linear_args& a;
  const int64_t in, blocks, group_blocks, groups;
  const UnpackPairs parts[2];
  alignas(64) float acc[T][M * kTileRows][kTileOutputs];
  alignas(64) float dots[kParts][M * kTileRows][kTileOutputs];
  alignas(64) uint16_t pairs[kBuffers][T][kParts][kTileRows][2 * kTileOutputs];

  explicit Product(const mlspec_linear_args& args)
      : a(args), in(a.in_features), blocks(in / kBlock), group_blocks(a.group / kBlock),
        groups(blocks / group_blocks), parts{{a, 0}, {a, 1}} {}

  // kCount of the T tiles of outputs times `rows` tokens, over all of in_features. Blocks are unpacked kAhead ahead: a tile
  // load waits until what was stored there has left the store buffer.
  template <int kCount>
  void run(int64_t tile, int64_t token, int rows) {
    for (int i = 0; i < kCount; ++i) std::memset(acc[i], 0, rows * sizeof acc[i][0]);
    const TileStreams streams(blocks * kPlaneBytes, kCount, prefetch_distance(a));
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + tile * streams.tile_bytes;
    const uint16_t* x = static_cast<const uint16_t*>(a.acts->data) + token * in;
    for (int64_t block = 0; block < kAhead; ++block) unpack_tiles<kCount>(weight, std::min(block, blocks - 1), streams, block);
    int64_t block = 0;
    for (int64_t g = 0; g < groups; ++g) {
      clear_sums<0, kCount * M * kParts>();
      for (int64_t b = 0; b < group_blocks; ++b, ++block, x += kBlock) {
        load_x(x);
        // The last blocks are unpacked again, for nobody.
        add_block<0, kCount>(weight, std::min(block + kAhead, blocks - 1), streams, block);
      }
      add_group<0, kCount>(tile, g, rows);
    }
    for (int i = 0; i < kCount; ++i) add_rows(a, tile + i, token, rows, acc[i]);
  }

  inline void load_x(const uint16_t* x) {
    if constexpr (M == 2) load<kFullRows>(x, in * 2);
    load<kLastRows>(x + (M - 1) * kTileRows * in, in * 2);
  }

  template <int kCount>
  inline void unpack_tiles(const uint8_t* weight, int64_t block, const TileStreams& streams, int64_t buffer) {
    for (int i = 0; i < kCount; ++i) unpack_block(weight + i * streams.tile_bytes, block, streams, pairs[buffer][i]);
  }

  __attribute__((always_inline)) inline void unpack_block(const uint8_t* tile, int64_t block, const TileStreams& streams,
                                                          uint16_t (*to)[kTileRows][2 * kTileOutputs]) const {
    const int64_t offset = block * kPlaneBytes;
    prefetch_planes(a, tile + offset + streams.distance(offset));
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) {
      parts[i].pairs(tile + offset,
                     [&](int p, __m512i pair) __attribute__((always_inline)) { _mm512_store_si512(to[i][p], pair); });
    }
  }

  template <int kSum, int kEnd>
  void clear_sums() {
    if constexpr (kSum < kEnd) clear<kSum>(), clear_sums<kSum + 1, kEnd>();
  }

  // Unpacks block `next` of every tile and multiplies block `block` by x.
  template <int i, int kCount>
  inline void add_block(const uint8_t* weight, int64_t next, const TileStreams& streams, int64_t block) {
    if constexpr (i < kCount) {
      unpack_block(weight + i * streams.tile_bytes, next, streams, pairs[(block + kAhead) % kBuffers][i]);
      add_part<i, 0>(pairs[block % kBuffers][i]);
      add_block<i + 1, kCount>(weight, next, streams, block);
    }
  }

  template <int i, int kPart>
  inline void add_part(const uint16_t (*weights)[kTileRows][2 * kTileOutputs]) {
    if constexpr (kPart < kParts) {
      load<part_register(kPart)>(weights[kPart], 64);
      if constexpr (M == 2) multiply_add<sum_register<kParts, M>(i, 0, kPart), kFullRows, kPart>();
      multiply_add<sum_register<kParts, M>(i, M - 1, kPart), kLastRows, kPart>();
      add_part<i, kPart + 1>(weights);
    }
  }

  template <int i, int kPart>
  inline void store_sums() {
    if constexpr (kPart < kParts) {
      if constexpr (M == 2) store<sum_register<kParts, M>(i, 0, kPart)>(dots[kPart], 64);
      store<sum_register<kParts, M>(i, M - 1, kPart)>(dots[kPart][(M - 1) * kTileRows], 64);
      store_sums<i, kPart + 1>();
    }
  }

  template <int i, int kCount>
  inline void add_group(int64_t tile, int64_t g, int rows) {
    if constexpr (i < kCount) {
      store_sums<i, 0>();
      const uint16_t* scales = static_cast<const uint16_t*>(a.scale) + ((tile + i) * groups + g) * kTileOutputs;
      const __m512 scale = Zmm::load_float16(scales);
      for (int t = 0; t < rows; ++t) {
        __m512 sum = _mm512_load_ps(dots[0][t]);
        if constexpr (kParts == 2) sum = _mm512_add_ps(sum, _mm512_load_ps(dots[1][t]));
        _mm512_store_ps(acc[i][t], _mm512_fmadd_ps(sum, scale, _mm512_load_ps(acc[i][t])));
      }
      add_group<i + 1, kCount>(tile, g, rows);
    }
  }
};

template <int kParts, int M>
void multiply(const mlspec_linear_args& a, int64_t tile, int64_t tile_end, int64_t token, int rows) {
  constexpr int T = Product<kParts, M>::T;
  configure<kParts, T, M>(rows - (M - 1) * kTileRows);
  Product<kParts, M> product(a);
  for (; tile + T <= tile_end; tile += T) product.template run<T>(tile, token, rows);
  for (; tile < tile_end; ++tile) product.template run<1>(tile, token, rows);
}

// Tokens in parts of at most 32. A panel of outputs stays in L2 while the parts pass.
template <int kParts>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  constexpr int64_t kPanelBytes = 256 * 1024, kPart = 2 * kTileRows;
  const int64_t tokens = a.acts->num_rows, tile_bytes = a.in_features / kBlock * kPlaneBytes * a.num_planes;
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs;
  const int64_t panel = tokens <= kPart ? tile_end : std::max<int64_t>(4, kPanelBytes / tile_bytes / 4 * 4);
  for (int64_t tile = out_begin / kTileOutputs; tile < tile_end; tile += panel) {
    const int64_t end = std::min(tile + panel, tile_end);
    for (int64_t token = 0; token < tokens; token += kPart) {
      const int rows = static_cast<int>(std::min(tokens - token, kPart));
      if (rows > kTileRows) {
        multiply<kParts, 2>(a, tile, end, token, rows);
      } else {
        multiply<kParts, 1>(a, tile, end, token, rows);
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

MLSPEC_TARGET_END
