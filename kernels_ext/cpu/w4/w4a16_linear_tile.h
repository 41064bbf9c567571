// How does a 4-bit weight meet bfloat16 activations? One algorithm for every instruction set and every format.
//
// Included by each w4a16_linear_<isa>.cpp inside its anonymous namespace, after `Isa`, so that every function here is
// compiled for that instruction set and shared with no other file. A lane is an output; per scale group and token
//   dots = sum((code's value - zero) * x), every product exact, summed in float32 from 0;   acc = fma(dots, scale, acc).
// Isa has Float (kLanes = 16 / kVectors floats), kMaxTokens, tiles_for(tokens), prefetch(p) and
//   zeros(), store(p, v), what w4a16_linear_formats.h names, Zeros and load_zeros(p) (what a block needs of kLanes zero
//   points), Unpack<Format>, Tokens<N> with load(x, stride) (one block of N rows of x), and
//   add_block<Format, N>(unpack, weight, zeros, tokens, dots).

#include "w4a16_linear_formats.h"
#include "../tile_sums.h"
#include "../tile_streams.h"

// T tiles of 16 outputs times N tokens, over all of in_features.
template <class Format, int T, int N>
void multiply(const mlspec_linear_args& a, int64_t tile, int64_t token) {
  constexpr int V = Isa::kVectors;
  const int64_t in = a.in_features, blocks = in / kBlock, tile_bytes = blocks * kTileBytes;
  const int64_t group_blocks = Format::blocks_per_group(a), groups = blocks / group_blocks;
  const uint16_t* x = static_cast<const uint16_t*>(a.acts->data) + token * in;
  const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + tile * tile_bytes;
  const typename Isa::template Unpack<Format> unpack(a);
  const TileStreams streams(tile_bytes, T);
  typename Isa::template Tokens<N> tokens;
  typename Isa::Float acc[T][V][N];
  for (auto& tile_acc : acc) for (auto& row : tile_acc) for (auto& sum : row) sum = Isa::zeros();
  for (int64_t g = 0; g < groups; ++g) {
    typename Isa::Float dots[T][V][N];
    typename Isa::Zeros zeros[T][V];
    for (auto& tile_dots : dots) for (auto& row : tile_dots) for (auto& sum : row) sum = Isa::zeros();
    if constexpr (Format::kHasZeros) {
      for (int i = 0; i < T * V; ++i)
        zeros[i / V][i % V] = Isa::load_zeros(a.zero + ((tile + i / V) * groups + g) * kTileOutputs + i % V * kLanes);
    }
    for (int64_t b = 0; b < group_blocks; ++b, weight += kTileBytes, x += kBlock) {
      tokens.load(x, in);
      const int64_t ahead = streams.distance((g * group_blocks + b) * kTileBytes);
#pragma GCC unroll 4
      for (int i = 0; i < T * V; ++i) {
        const uint8_t* w = weight + i / V * tile_bytes;
        if (i % V == 0) Isa::prefetch(w + ahead);
        Isa::template add_block<Format, N>(unpack, w + i % V * kLanes * 4, zeros[i / V][i % V], tokens, dots[i / V][i % V]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < T * V; ++i) {
      const auto scale = Format::scale(a, ((tile + i / V) * groups + g) * kTileOutputs + i % V * kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) {
        acc[i / V][i % V][t] = Isa::fma(dots[i / V][i % V][t], scale, acc[i / V][i % V][t]);
      }
    }
  }
  for (int i = 0; i < T; ++i) store_tile<N>(a, tile + i, token, acc[i]);
}

template <class Format, int N>
void multiply_tiles(const mlspec_linear_args& a, int64_t tile, int64_t tile_end, int64_t token) {
  constexpr int T = Isa::tiles_for(N);
  for (; tile + T <= tile_end; tile += T) multiply<Format, T, N>(a, tile, token);
  if constexpr (T > 1) {
    for (; tile < tile_end; ++tile) multiply<Format, 1, N>(a, tile, token);
  }
}

using TileFunction = void (*)(const mlspec_linear_args&, int64_t tile, int64_t tile_end, int64_t token);

template <class Format, int... N>
constexpr auto widths(std::integer_sequence<int, N...>) {
  return std::array<TileFunction, sizeof...(N)>{multiply_tiles<Format, N + 1>...};
}

// Tokens are cut into near-equal parts of at most kMaxTokens (17 = 9 + 8), each of which unpacks the weights again: a tenth
// of its time. A panel of outputs stays in L2 while the parts pass; where there is one part, the panel is everything.
template <class Format>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  static constexpr auto kWidths = widths<Format>(std::make_integer_sequence<int, Isa::kMaxTokens>());
  constexpr int64_t kPanelBytes = 256 * 1024;
  const int64_t tokens = a.acts->num_rows, tile_bytes = a.in_features / kBlock * kTileBytes;
  const int64_t parts = (tokens + Isa::kMaxTokens - 1) / Isa::kMaxTokens;
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs;
  const int64_t panel = parts == 1 ? tile_end : std::max<int64_t>(2, kPanelBytes / tile_bytes);
  for (int64_t tile = out_begin / kTileOutputs; tile < tile_end; tile += panel) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * tokens / parts, end = (part + 1) * tokens / parts;
      kWidths[end - begin - 1](a, tile, std::min(tile + panel, tile_end), begin);
    }
  }
}

inline void int4_linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  if (a.zero) return linear<Int4<true>>(a, out_begin, out_end);
  linear<Int4<false>>(a, out_begin, out_end);
}
