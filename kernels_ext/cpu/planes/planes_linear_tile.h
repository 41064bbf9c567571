// How does a weight of bit-planes meet bfloat16 activations? One algorithm for every instruction set without matrices.
//
// Included by planes_linear_<isa>.cpp inside its anonymous namespace, after `Isa`, as w4a16_linear_tile.h is. A lane is
// an output; per scale group and token
//   dots = sum(value of the code * x), every product exact, summed in float32 from 0;   acc = fma(dots, scale, acc).
// Isa has Float (kLanes = 16 / kVectors floats), kMaxTokens, tiles_for(tokens, parts), zeros(), store(p, v), fma(a, b, c),
//   load_float16(p), Tokens<N> with load(x, stride) (one block of N rows of x), Unpack<kParts> (planes <= 4 or more), and
//   add_block<kParts, N>(unpack, block of the first plane, tokens, dots).

#include "../tile_sums.h"
#include "../tile_streams.h"

// T tiles of 16 outputs times N tokens, over all of in_features.
template <int kParts, int T, int N>
void multiply(const mlspec_linear_args& a, const Isa::Unpack<kParts>& unpack, int64_t tile, int64_t token) {
  constexpr int V = Isa::kVectors;
  const int64_t in = a.in_features, blocks = in / kBlock, tile_bytes = blocks * kPlaneBytes;
  const int64_t group_blocks = a.group / kBlock, groups = blocks / group_blocks;
  const uint16_t* x = static_cast<const uint16_t*>(a.acts->data) + token * in;
  const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + tile * tile_bytes;
  const uint16_t* scales = static_cast<const uint16_t*>(a.scale) + tile * groups * kTileOutputs;
  const TileStreams streams(tile_bytes, T, prefetch_distance(a));
  typename Isa::template Tokens<N> tokens;
  typename Isa::Float acc[T][V][N];
  for (auto& tile_acc : acc) for (auto& row : tile_acc) for (auto& sum : row) sum = Isa::zeros();
  for (int64_t g = 0; g < groups; ++g, scales += kTileOutputs) {
    typename Isa::Float dots[T][V][N];
    for (auto& tile_dots : dots) for (auto& row : tile_dots) for (auto& sum : row) sum = Isa::zeros();
    for (int64_t b = 0; b < group_blocks; ++b, weight += kPlaneBytes, x += kBlock) {
      tokens.load(x, in);
      const int64_t ahead = streams.distance((g * group_blocks + b) * kPlaneBytes);
#pragma GCC unroll 4
      for (int i = 0; i < T * V; ++i) {
        const uint8_t* block = weight + i / V * tile_bytes;
        if (i % V == 0) prefetch_planes(a, block + ahead);
        Isa::template add_block<kParts, N>(unpack, block + i % V * kLanes * 4, tokens, dots[i / V][i % V]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < T * V; ++i) {
      const auto scale = Isa::load_float16(scales + i / V * groups * kTileOutputs + i % V * kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) acc[i / V][i % V][t] = Isa::fma(dots[i / V][i % V][t], scale, acc[i / V][i % V][t]);
    }
  }
  for (int i = 0; i < T; ++i) store_tile<N>(a, tile + i, token, acc[i]);
}

template <int kParts, int N>
void multiply_tiles(const mlspec_linear_args& a, const Isa::Unpack<kParts>& unpack, int64_t tile, int64_t tile_end,
                    int64_t token) {
  constexpr int T = Isa::tiles_for(N, kParts);
  for (; tile + T <= tile_end; tile += T) multiply<kParts, T, N>(a, unpack, tile, token);
  if constexpr (T > 1) {
    for (; tile < tile_end; ++tile) multiply<kParts, 1, N>(a, unpack, tile, token);
  }
}

template <int kParts>
using TileFunction = void (*)(const mlspec_linear_args&, const Isa::Unpack<kParts>&, int64_t tile, int64_t tile_end,
                              int64_t token);

template <int kParts, int... N>
constexpr auto widths(std::integer_sequence<int, N...>) {
  return std::array<TileFunction<kParts>, sizeof...(N)>{multiply_tiles<kParts, N + 1>...};
}

// Tokens are cut into near-equal parts of at most kMaxTokens, each of which unpacks the weights again. A panel of outputs
// stays in L2 while the parts pass; where there is one part, the panel is everything.
template <int kParts>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  static constexpr auto kWidths = widths<kParts>(std::make_integer_sequence<int, Isa::kMaxTokens>());
  constexpr int64_t kPanelBytes = 256 * 1024;
  const Isa::Unpack<kParts> unpack(a);
  const int64_t tokens = a.acts->num_rows, tile_bytes = a.in_features / kBlock * kPlaneBytes * a.num_planes;
  const int64_t parts = (tokens + Isa::kMaxTokens - 1) / Isa::kMaxTokens;
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs;
  const int64_t panel = parts == 1 ? tile_end : std::max<int64_t>(2, kPanelBytes / tile_bytes);
  for (int64_t tile = out_begin / kTileOutputs; tile < tile_end; tile += panel) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * tokens / parts, end = (part + 1) * tokens / parts;
      kWidths[end - begin - 1](a, unpack, tile, std::min(tile + panel, tile_end), begin);
    }
  }
}

inline void bitplane_linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  if (a.num_planes > kNibblePlanes) return linear<2>(a, out_begin, out_end);
  linear<1>(a, out_begin, out_end);
}
