// BF16 linear with AMX: 16 rows of weights as they lie in the matrix are operand A, 16 activation rows in tiles are B.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../target.h"

MLSPEC_TARGET_AVX512("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")

namespace {

constexpr int kTile = 16, kBlock = 32, kTileElements = kTile * kBlock;
constexpr int64_t kAhead = 2 * kBlock, kPageBytes = 4096;

// Registers: sums [G][H] in 0..3, weights from 4 up, activations from 7 down. GCC's intrinsics take literal numbers only.
constexpr int weight_register(int g) { return 4 + g % 3; }
constexpr int x_register(int h) { return 7 - h; }

template <int kRegister>
inline void load(const uint16_t* p, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(kRegister) : "memory");
}

template <int kRegister>
inline void store(float (*p)[kTile]) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t{sizeof *p}), "i"(kRegister) : "memory");
}

template <int kSum, int kWeight, int kX>
inline void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kX), "i"(kWeight), "i"(kSum));
}

template <int kRegister, int kEnd>
inline void clear() {
  if constexpr (kRegister < kEnd) {
    asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
    clear<kRegister + 1, kEnd>();
  }
}

void configure() {  // every register 16 rows of 64 bytes
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  asm volatile("ldtilecfg %0" ::"m"(config));  // GCC's intrinsic reads 8 of its 64 bytes as far as the optimizer knows
}

// G tiles of outputs from `feature` on times H tiles of activation rows from `x_tile` on.
template <int G, int H>
struct Product {
  const mlspec_linear_args& a;
  const int64_t feature, x_tile;
  const int64_t in = a.in_features, x_stride = (in + kBlock - 1) / kBlock * kTileElements;
  const int outputs = static_cast<int>(std::min<int64_t>(a.out_features - feature, G * kTile));
  const uint16_t* w = static_cast<const uint16_t*>(a.weight) + feature * in;
  const uint16_t* x = static_cast<const uint16_t*>(a.acts->data) + x_tile * x_stride;

  void run() {
    clear<0, G * H>();
    int64_t k = 0;
    if (outputs == G * kTile) {
      for (; k + kBlock <= in; k += kBlock) {
        if (G * H == 1 && stream_breaks(k)) prefetch(w + k + kAhead + (k + kAhead < in ? 0 : (kTile - 1) * in));
        load_x<0>(k);
        step<0>(w + k, in * 2);
      }
    }
    for (; k < in; k += kBlock) {  // beyond the last output or the last element lies what must not be read, or multiplied
      load_x<0>(k);
      step_edge<0>(k);
    }
    store_sums<0>();
  }

  // The processor's own prefetchers follow sixteen rows, but not from page to page nor from the end of a row to the next
  // panel. Prefetching more than those starts takes half of the speed of weights in L2, and gains nothing from DRAM.
  bool stream_breaks(int64_t k) const {
    const bool page_ends = reinterpret_cast<uintptr_t>(w + k) % kPageBytes >= kPageBytes - 2 * kAhead;
    return page_ends || k + kAhead >= in;
  }

  // Always inline: GCC drops the call of a function that does nothing but prefetch.
  __attribute__((always_inline)) inline void prefetch(const uint16_t* p) const {
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r) __builtin_prefetch(p + r * in, 0, 2);
  }

  template <int h>
  inline void load_x(int64_t k) const {
    load<x_register(h)>(x + h * x_stride + k * kTile, 64);
    if constexpr (h + 1 < H) load_x<h + 1>(k);
  }

  template <int g, int h>
  inline void multiply() const {
    multiply_add<g * H + h, weight_register(g), x_register(h)>();
    if constexpr (h + 1 < H) multiply<g, h + 1>();
  }

  template <int g>
  inline void step(const uint16_t* rows, int64_t stride_bytes) const {
    load<weight_register(g)>(rows, stride_bytes);
    multiply<g, 0>();
    if constexpr (g + 1 < G) step<g + 1>(rows + kTile * stride_bytes / 2, stride_bytes);
  }

  template <int g>
  void step_edge(int64_t k) const {
    alignas(64) uint16_t rows[kTile][kBlock] = {};
    const int64_t bytes = std::min<int64_t>(in - k, kBlock) * 2;
    for (int r = 0; r < std::min(outputs - g * kTile, kTile); ++r)
      std::memcpy(rows[r], w + (g * kTile + r) * in + k, bytes);
    load<weight_register(g)>(rows[0], kBlock * 2);
    multiply<g, 0>();
    if constexpr (g + 1 < G) step_edge<g + 1>(k);
  }

  template <int s>
  void store_sums() const {
    alignas(64) float sums[kTile][kTile];  // [outputs][activation rows]
    store<s>(sums);
    store_rows(s / H, s % H, sums);
    if constexpr (s + 1 < G * H) store_sums<s + 1>();
  }

  void store_rows(int g, int h, const float (*sums)[kTile]) const {
    const int64_t first = (x_tile + h) * kTile, rows = std::min<int64_t>(a.acts->num_rows - first, kTile);
    const int64_t m = feature + g * kTile;
    const int count = std::max(std::min(outputs - g * kTile, kTile), 0);
    const __mmask16 valid = static_cast<__mmask16>((1u << count) - 1);
    const __m512i column = _mm512_slli_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);
    for (int64_t r = 0; r < rows; ++r) {
      __m512 value = _mm512_i32gather_ps(column, sums[0] + r, 4);
      if (a.bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(valid, a.bias + m));
      float* y = a.y + (first + r) * a.y_stride + m;
      if (a.accumulate) value = _mm512_add_ps(_mm512_maskz_loadu_ps(valid, y), value);
      _mm512_mask_storeu_ps(y, valid, value);
    }
  }
};

// One tile of activations waits for memory: 16 rows at a time are read fastest (32 cost 3 %, 64 half of the bandwidth).
// Two tiles of them times two of outputs keep the multiplier busy.
template <int H>
void tile_outputs(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end, int64_t x_tile) {
  constexpr int G = H;
  int64_t feature = out_begin;
  for (; feature + G * kTile <= out_end; feature += G * kTile) Product<G, H>{a, feature, x_tile}.run();
  for (; feature < out_end; feature += kTile) Product<1, H>{a, feature, x_tile}.run();
}

// Outputs in panels that stay in L2 while every pair of activation tiles passes.
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  constexpr int64_t kPanelBytes = 1 << 20;  // of 2 MB
  const int64_t x_tiles = (a.acts->num_rows + kTile - 1) / kTile;
  const int64_t fit = std::max<int64_t>(kPanelBytes / (a.in_features * 64), 1) * 32;
  const int64_t panel = x_tiles <= 2 ? out_end - out_begin : fit;
  configure();
  for (int64_t feature = out_begin; feature < out_end; feature += panel) {
    const int64_t end = std::min(feature + panel, out_end);
    for (int64_t t = 0; t + 2 <= x_tiles; t += 2) tile_outputs<2>(a, feature, end, t);
    if (x_tiles % 2) tile_outputs<1>(a, feature, end, x_tiles - 1);
  }
}

}  // namespace

extern "C" void mlspec_bf16_linear_amx(const mlspec_linear_args* args, int64_t out_begin, int64_t out_end) {
  linear(*args, out_begin, out_end);
  asm volatile("tilerelease");
}

MLSPEC_TARGET_END
