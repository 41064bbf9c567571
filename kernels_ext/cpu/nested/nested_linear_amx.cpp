// Exact product with a nested weight with AMX: rows of x as they lie are A, steps rebuilt just in time are B.
//
// dense_linear_amx.cpp has the operands the other way round; a sum takes its products in the same order, so the bits are the same.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")

namespace {

#include "../amx_registers.h"
#include "nested_rebuild_zmm.h"
#include "nested_steps.h"

constexpr int kOtherRows = 7;  // where full rows, or weights, take turns in two registers

template <int kSums, int kX, int kFrom = kWeights>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kFrom), "i"(kX), "i"(kSums));
}

// T tiles of outputs times M tiles of rows of x, the last of which may be short: sum (i, m) is register i * M + m.
template <int T, int M>
struct Product {
  static_assert(T * M <= 4 && (T == 1 || M <= 2));
  static constexpr int x_register(int m) { return m == M - 1 ? kLastRows : m % 2 ? kOtherRows : kFullRows; }
  static constexpr int64_t kAhead = 16;  // steps

  const mlspec_linear_args& a;
  const int64_t in = a.in_features, steps = in / kBlock;
  const Rebuild rebuild;
  alignas(64) Pairs pairs[2][T];  // two steps: one is read while the other is written

  static void configure(int last_rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int i = 0; i < T; ++i) config.rows[i * M + M - 1] = static_cast<uint8_t>(last_rows);
    config.rows[kLastRows] = static_cast<uint8_t>(last_rows);
    asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic reads 8 of its 64 bytes as far as the optimizer knows
  }

  // kCount of the T tiles. Steps are rebuilt one ahead: a tile load waits until what was stored there has left the store buffer.
  template <int kCount>
  void run(int64_t tile, int64_t rows) {
    const TileSteps first(a, tile);
    const uint16_t* x = static_cast<const uint16_t*>(a.acts->data);
    clear_sums<0, kCount * M>();
    for (int i = 0; i < kCount; ++i) first.rebuild(rebuild, i * steps, pairs[0][i]);
    for (int64_t step = 1; step <= steps; ++step, x += kBlock) {
      // The streams of the tiles end together, and each goes on with the tile kCount further.
      const int64_t ahead = step + kAhead < steps ? kAhead : kAhead + (kCount - 1) * steps;
      add_step<0, kCount>(first, std::min(step, steps - 1), ahead, x, step % 2);  // the last step is rebuilt twice
    }
    store_sums<0, kCount>(tile, rows);
  }

  template <int kSum, int kEnd>
  static void clear_sums() {
    if constexpr (kSum < kEnd) clear<kSum>(), clear_sums<kSum + 1, kEnd>();
  }

  // Rebuilds step `next` of every tile into one half of the buffer and multiplies the other half by x.
  template <int i, int kCount>
  inline void add_step(const TileSteps& first, int64_t next, int64_t ahead, const uint16_t* x, int next_half) {
    if constexpr (i < kCount) {
      first.prefetch<1>(i * steps + next + ahead, 0);
      first.rebuild(rebuild, i * steps + next, pairs[next_half][i]);
      load<kWeights>(pairs[1 - next_half][i], 64);
      multiply_rows<i, 0>(x);
      add_step<i + 1, kCount>(first, next, ahead, x, next_half);
    }
  }

  template <int i, int m>
  inline void multiply_rows(const uint16_t* x) const {
    if constexpr (m < M) {
      if constexpr (i == 0) load<x_register(m)>(x + m * kTileRows * in, in * 2);
      multiply_add<i * M + m, x_register(m)>();
      multiply_rows<i, m + 1>(x);
    }
  }

  template <int kSum, int kCount>
  void store_sums(int64_t tile, int64_t rows) const {
    if constexpr (kSum < kCount * M) {
      alignas(64) float sums[kTileRows][kTileOutputs];
      constexpr int64_t kFirst = kSum % M * kTileRows;
      store<kSum>(sums, 64);
      for (int64_t t = 0; t < std::min<int64_t>(rows - kFirst, kTileRows); ++t)
        add_row(a, tile + kSum / M, kFirst + t, sums[t]);
      store_sums<kSum + 1, kCount>(tile, rows);
    }
  }
};

template <int T, int M>
void multiply(const mlspec_linear_args& a, int64_t tile, int64_t tile_end, int64_t rows) {
  Product<T, M>::configure(static_cast<int>(rows - (M - 1) * kTileRows));
  Product<T, M> product{a};
  for (; tile + T <= tile_end; tile += T) product.template run<T>(tile, rows);
  for (; tile < tile_end; ++tile) product.template run<1>(tile, rows);
}

#include "nested_panel_amx.h"

// Up to 64 rows are multiplied while weights are rebuilt; of more, rebuilding would be most of the time.
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  const int64_t rows = a.acts->num_rows, tile = out_begin / kTileOutputs, end = (out_end + kTileOutputs - 1) / kTileOutputs;
  switch ((rows + kTileRows - 1) / kTileRows) {
    case 0: return;
    case 1: multiply<2, 1>(a, tile, end, rows); break;
    case 2: multiply<2, 2>(a, tile, end, rows); break;
    case 3: multiply<1, 3>(a, tile, end, rows); break;
    case 4: multiply<1, 4>(a, tile, end, rows); break;
    default: panel_linear(a, tile, end);
  }
  asm volatile("tilerelease");
}

}  // namespace

MLSPEC_LINEAR(nested_linear_exact_amx, linear)

MLSPEC_TARGET_END
