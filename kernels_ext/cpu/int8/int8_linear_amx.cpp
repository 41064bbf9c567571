// 4-bit weights times int8 activations with AMX: tdpbssd multiplies up to 16 tokens by 16 outputs.
//
// The caller's process holds the permission for tile data. Integers are exact, so few tokens stay with vpdpbusd.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,fma,f16c,amx-tile,amx-int8")

namespace {

#define MLSPEC_INT8_VBMI
#include "int8_linear_zmm.h"
#include "int8_linear_tile.h"
#include "../amx_registers.h"

template <int kSums, int kX>
inline void multiply_add() {
  asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kWeights), "i"(kX), "i"(kSums));
}

// Nibbles to signed integers with the zero point taken off, so that a dot is exact as it comes: by a table where all outputs
// have one zero point. A table that repeats every 16 entries does not see the upper bits of vpermb's index.
template <class Format, bool kHasZeros>
struct SignedCodes {
  __m512i mask = _mm512_set1_epi8(15), table;
  explicit SignedCodes(const mlspec_linear_args& a) {
    alignas(16) int8_t values[16];
    Format::fill(a, values);
    for (int8_t& value : values) value = static_cast<int8_t>(value - Format::offset(a));
    table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)values));
  }
  static __m512i zeros(const mlspec_linear_args& a, int64_t at) {  // each output's in its four bytes
    if constexpr (!kHasZeros) return _mm512_setzero_si512();
    return _mm512_mullo_epi32(Isa::load_bytes(a.zero + at), _mm512_set1_epi32(0x01010101));
  }
  __m512i low(__m512i bytes, __m512i zeros) const {
    if constexpr (!kHasZeros) return _mm512_permutexvar_epi8(bytes, table);
    return _mm512_sub_epi8(_mm512_and_si512(bytes, mask), zeros);
  }
};

// T tiles of outputs times M tiles of tokens, S blocks of 32 elements at a step: both operands of a tile instruction are full
// where S is 2. Dots of a group are exact, then they are scaled, as everywhere.
template <class Format, bool kHasZeros, int T, int M, int S>
struct Product {
  static constexpr int kStep = S * kBlock;
  const mlspec_linear_args& a;
  const int64_t in, steps, groups, group_steps;
  const int8_t* const x = mlspec_acts_codes(a.acts);
  const float* const x_scales = mlspec_acts_scales(a.acts);
  const SignedCodes<Format, kHasZeros> unpack;
  alignas(64) float acc[T][M * kTileRows][kTileOutputs];
  alignas(64) int32_t dots[T * M][kTileRows][kTileOutputs];
  alignas(64) int8_t codes[2 * T][S * 8][64];  // two steps: one is read while the other is written

  explicit Product(const mlspec_linear_args& args)
      : a(args), in(a.in_features), steps(in / kStep), groups(mlspec_groups(a.acts)), group_steps(steps / groups), unpack(args) {}

  // Registers for M tiles of tokens, the last of which has `last_rows` rows; sum (i, m) is register i * M + m.
  static void configure(int last_rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, kStep, kStep};
      uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, S * 8, kTileRows};
    } config;
    for (int i = 0; i < T; ++i) config.rows[i * M + M - 1] = static_cast<uint8_t>(last_rows);
    config.rows[kLastRows] = static_cast<uint8_t>(last_rows);
    asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic reads 8 of its 64 bytes as far as the optimizer knows
  }

  // kCount of the T tiles of outputs times `rows` tokens, over all of in_features. Codes are unpacked one step ahead: a tile
  // load waits until what was stored there has left the store buffer.
  template <int kCount>
  void run(int64_t tile, int64_t token, int rows) {
    for (int i = 0; i < kCount; ++i) std::memset(acc[i], 0, rows * sizeof acc[i][0]);
    const int64_t tile_bytes = steps * S * kTileBytes;
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + tile * tile_bytes;
    const int8_t* step_x = x + token * in;
    const TileStreams streams(tile_bytes, kCount);
    for (int i = 0; i < kCount; ++i) unpack_step(tile + i, 0, weight + i * tile_bytes, streams.ahead, codes[i]);
    int64_t step = 0;
    for (int64_t g = 0; g < groups; ++g) {
      clear_sums<0, kCount * M>();
      for (int64_t s = 1; s <= group_steps; ++s, step_x += kStep) {
        const int64_t next = std::min(++step, steps - 1);  // the last step is unpacked twice
        const int64_t next_group = s < group_steps || step == steps ? g : g + 1;
        add_step<0, kCount>(tile, next_group, weight, next * S * kTileBytes, streams, step_x, step % 2);
      }
      add_group<0, kCount>(tile, token, g, rows);
    }
    for (int i = 0; i < kCount; ++i)
      for (int t = 0; t < rows; t += kTileRows) add_rows(a, tile + i, token + t, std::min(rows - t, kTileRows), acc[i] + t);
  }

  inline void unpack_step(int64_t tile, int64_t g, const uint8_t* bytes, int64_t ahead, int8_t (*to)[64]) const {
    const __m512i zeros = unpack.zeros(a, (tile * groups + g) * kTileOutputs);
#pragma GCC unroll 2
    for (int s = 0; s < S; ++s) {
      Isa::prefetch(bytes + ahead + s * kTileBytes);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i both = _mm512_loadu_si512(bytes + s * kTileBytes + 64 * j);
        _mm512_store_si512(to[8 * s + 2 * j], unpack.low(both, zeros));
        _mm512_store_si512(to[8 * s + 2 * j + 1], unpack.low(_mm512_srli_epi16(both, 4), zeros));
      }
    }
  }

  template <int kSum, int kEnd>
  void clear_sums() {
    if constexpr (kSum < kEnd) clear<kSum>(), clear_sums<kSum + 1, kEnd>();
  }

  // Unpacks the next step, at byte `offset` of every tile, into the half `next_half` of the buffer and multiplies the other
  // half by x.
  template <int i, int kCount>
  inline void add_step(int64_t tile, int64_t next_group, const uint8_t* weight, int64_t offset, const TileStreams& streams,
                       const int8_t* step_x, int next_half) {
    if constexpr (i < kCount) {
      const uint8_t* const next = weight + i * streams.tile_bytes + offset;
      unpack_step(tile + i, next_group, next, streams.distance(offset), codes[next_half * T + i]);
      load<kWeights>(codes[(1 - next_half) * T + i], 64);
      if constexpr (M == 2) {
        if constexpr (i == 0) load<kFullRows>(step_x, in);
        multiply_add<i * M, kFullRows>();
      }
      if constexpr (i == 0) load<kLastRows>(step_x + (M - 1) * kTileRows * in, in);
      multiply_add<i * M + M - 1, kLastRows>();
      add_step<i + 1, kCount>(tile, next_group, weight, offset, streams, step_x, next_half);
    }
  }

  template <int i, int kCount>
  inline void add_group(int64_t tile, int64_t token, int64_t g, int rows) {
    if constexpr (i < kCount) {
      if constexpr (M == 2) store<i * M>(dots[i * M], 64);
      store<i * M + M - 1>(dots[i * M + M - 1], 64);
      const __m512 scale = Format::scale(a, ((tile + i) * groups + g) * kTileOutputs);
      const int32_t* sums = dots[i * M][0];
      for (int64_t t = 0, place = token * groups + g; t < rows; ++t, place += groups) {
        const __m512 dot = Isa::to_float(_mm512_load_si512(sums + t * kTileOutputs));
        _mm512_store_ps(acc[i][t], Isa::fma(dot, Isa::times(scale, x_scales[place]), _mm512_load_ps(acc[i][t])));
      }
      add_group<i + 1, kCount>(tile, token, g, rows);
    }
  }
};

template <class Format, bool kHasZeros, int T, int M, int S>
void matrix_tiles(const mlspec_linear_args& a, int64_t tile, int64_t tile_end, int64_t token, int rows) {
  Product<Format, kHasZeros, T, M, S>::configure(rows - (M - 1) * kTileRows);
  Product<Format, kHasZeros, T, M, S> product(a);
  for (; tile + T <= tile_end; tile += T) product.template run<T>(tile, token, rows);
  for (; tile < tile_end; ++tile) product.template run<1>(tile, token, rows);
}

// Tokens from which tiles are faster than vpdpbusd, groups of 32 and larger ones; measured on Granite Rapids.
constexpr int64_t kFromSmallGroups = 12, kFromGroups = 6;

// Tokens in near-equal parts of at most 32. A panel of outputs stays in L2 while the parts pass.
template <class Format, bool kHasZeros, int S>
void matrix_linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  constexpr int64_t kPanelBytes = 256 * 1024, kPart = 2 * kTileRows;
  const int64_t tokens = a.acts->num_rows, tile_bytes = a.in_features / kBlock * kTileBytes;
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs, parts = (tokens + kPart - 1) / kPart;
  const int64_t panel = parts == 1 ? tile_end : std::max<int64_t>(4, kPanelBytes / tile_bytes / 4 * 4);
  for (int64_t tile = out_begin / kTileOutputs; tile < tile_end; tile += panel) {
    const int64_t end = std::min(tile + panel, tile_end);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t token = part * tokens / parts;
      const int rows = static_cast<int>((part + 1) * tokens / parts - token);
      if (rows > kTileRows) {
        matrix_tiles<Format, kHasZeros, 2, 2, S>(a, tile, end, token, rows);
      } else {
        matrix_tiles<Format, kHasZeros, 4, 1, S>(a, tile, end, token, rows);
      }
    }
  }
  _tile_release();
}

}  // namespace

extern "C" void mlspec_mxfp4_linear_int8_amx(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  if (args->acts->num_rows < kFromSmallGroups) return linear<Mxfp4>(*args, begin, end);
  matrix_linear<Mxfp4, false, 1>(*args, begin, end);
}

extern "C" void mlspec_nested_linear_int8_amx(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  if (args->acts->num_rows < kFromSmallGroups) return linear<Nested>(*args, begin, end);
  matrix_linear<Nested, false, 1>(*args, begin, end);
}

MLSPEC_LINEAR(bitplane_linear_int8_amx, bitplane_linear_int8)

extern "C" void mlspec_int4_linear_int8_amx(const mlspec_linear_args* args, int64_t begin, int64_t end) {
  const bool small_groups = args->group == kBlock;
  if (args->acts->num_rows < (small_groups ? kFromSmallGroups : kFromGroups)) return linear<Int4>(*args, begin, end);
  if (args->zero && small_groups) return matrix_linear<Int4, true, 1>(*args, begin, end);
  if (args->zero) return matrix_linear<Int4, true, 2>(*args, begin, end);
  if (small_groups) return matrix_linear<Int4, false, 1>(*args, begin, end);
  matrix_linear<Int4, false, 2>(*args, begin, end);
}

MLSPEC_TARGET_END
