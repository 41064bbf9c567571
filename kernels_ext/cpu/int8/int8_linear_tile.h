// How does a weight of few bits meet int8 activations? One algorithm for every instruction set and every format.
//
// Included by each int8_linear_<isa>.cpp inside its anonymous namespace, after `Isa`, so that every function here
// is compiled for that instruction set and shared with no other file. A lane is an output; per scale group and token
//   dots = -zero * sum(x) + sum(code * x), exact;  acc = fma(float(dots), weight scale * x scale, acc) group by group.
// Isa has Int and Float (vectors of kLanes = 16 / kVectors lanes), kSigned (its dot product takes signed codes),
// kMaxTokens, tiles_for(tokens), prefetch(p) and
//   broadcast(i), load_bytes(p) (kLanes bytes to int32), minus(i) (-i in the lower int16, zero above),
//   low_products(a, b) (int16 a, zero above, times int16 b),
//   zeros(), fma(a, b, c), times(v, scalar), half(v) (v / 2, Inf to NaN), power(i) (i << 23 as floats), to_float(i),
//   load_float16(p), store(p, v), Unpack<Format> and add_block<Format, N>(unpack, weight, x, dots).

#include "../tile_streams.h"

using mlspec::kBlock, mlspec::cpu_tiles::kTileBytes, mlspec::cpu_tiles::kTileOutputs;
constexpr int kLanes = 16 / Isa::kVectors;

// E2M1 doubled is exact in int8; an unsigned operand carries 12 more, taken back 12 * sum(x) at a time.
constexpr int kMxfp4Offset = Isa::kSigned ? 0 : 12;

constexpr int kVaries = -1;  // an offset that differs between outputs

// How 4-bit tiles lie: kTileBytes a block of 32 elements, scales in the groups of the activations, x in the order of memory.
// Bit-planes have these names, too (../planes/planes_int8.h).
template <class Format>
struct NibbleTiles {
  static constexpr int64_t kBlockBytes = kTileBytes, kAhead = 4096;
  static int64_t bytes_read(const mlspec_linear_args& a) { return a.in_features / kBlock * kTileBytes; }  // of a tile
  static int64_t scale_row(const mlspec_linear_args&, int64_t tile, int64_t g, int64_t groups) { return tile * groups + g; }
  static auto unpack(const mlspec_linear_args& a) { return typename Isa::template Unpack<Format>(a); }
  static void prefetch(const mlspec_linear_args&, const uint8_t* block) { Isa::prefetch(block); }
  template <int N>
  static const int8_t* in_order(const int8_t* x, int8_t*) {
    return x;
  }
  template <int N>
  static inline __attribute__((always_inline)) void add_block(const typename Isa::template Unpack<Format>& unpack,
                                                              const uint8_t* weight, const int8_t* x, Isa::Int (&dots)[N]) {
    Isa::template add_block<Format, N>(unpack, weight, x, dots);
  }
};

// What the 16 codes of a sign and an index mean, as operands.
template <class Magnitude>
inline void fill_signed(const Magnitude* magnitude, int offset, int8_t (&values)[16]) {
  for (int index = 0; index < 8; ++index) {
    values[index] = static_cast<int8_t>(offset + magnitude[index]);
    values[index + 8] = static_cast<int8_t>(offset - magnitude[index]);
  }
}

struct Mxfp4 : NibbleTiles<Mxfp4> {
  static constexpr int kLargestCode = 24;
  static constexpr bool kUsesTable = true;
  static void fill(const mlspec_linear_args&, int8_t (&values)[16]) {
    constexpr auto magnitude = mlspec::kDoubledMagnitudes;
    fill_signed(magnitude.of, kMxfp4Offset, values);
  }
  static int64_t blocks_per_group(const mlspec_linear_args&) { return 1; }
  static int offset(const mlspec_linear_args&) { return kMxfp4Offset; }
  static Isa::Int minus_zero(const mlspec_linear_args&, int64_t) { return Isa::broadcast(-kMxfp4Offset & 0xFFFF); }
  // at: index of the first lane's scale. 2^(byte - 128): a half belongs to the doubled codes. Byte 0 is 0, 255 is NaN.
  static Isa::Float scale(const mlspec_linear_args& a, int64_t at) {
    return Isa::half(Isa::power(Isa::load_bytes(static_cast<const uint8_t*>(a.scale) + at)));
  }
};

// The draft of a nested weight: MXFP4 with a codebook that the weight brings along, in units of 2^(byte - 132).
struct Nested : NibbleTiles<Nested> {
  static constexpr int kOffset = Isa::kSigned ? 0 : 63, kLargestCode = 126;  // entries are 0..63
  static_assert(2 * kLargestCode * 127 <= 32767, "two products fit the int16 of vpmaddubsw");
  static constexpr bool kUsesTable = true;
  static void fill(const mlspec_linear_args& a, int8_t (&values)[16]) { fill_signed(a.codebook, kOffset, values); }
  static int64_t blocks_per_group(const mlspec_linear_args&) { return 1; }
  static int offset(const mlspec_linear_args&) { return kOffset; }
  static Isa::Int minus_zero(const mlspec_linear_args&, int64_t) { return Isa::broadcast(-kOffset & 0xFFFF); }
  static Isa::Float scale(const mlspec_linear_args& a, int64_t at) {  // exact: byte >= 31 wherever there is an output
    return Isa::times(Isa::power(Isa::load_bytes(static_cast<const uint8_t*>(a.scale) + at)), 0x1p-5f);
  }
};

struct Int4 : NibbleTiles<Int4> {
  static constexpr int kLargestCode = 15;
  static constexpr bool kUsesTable = false;  // the code is the operand
  static void fill(const mlspec_linear_args&, int8_t (&values)[16]) {
    for (int code = 0; code < 16; ++code) values[code] = static_cast<int8_t>(code);
  }
  static int64_t blocks_per_group(const mlspec_linear_args& a) { return a.group / kBlock; }
  static int offset(const mlspec_linear_args& a) { return a.zero ? kVaries : 8; }
  static Isa::Int minus_zero(const mlspec_linear_args& a, int64_t at) {
    return a.zero ? Isa::minus(Isa::load_bytes(a.zero + at)) : Isa::broadcast(-8 & 0xFFFF);
  }
  static Isa::Float scale(const mlspec_linear_args& a, int64_t at) {
    return Isa::load_float16(static_cast<const uint16_t*>(a.scale) + at);
  }
};

template <bool kBias, bool kAccumulate>
inline void add_outputs(const float (*sums)[kTileOutputs], const float* bias, int64_t outputs, int count, int64_t y_stride,
                        float* y) {
  for (int t = 0; t < count; ++t) {
    float* const __restrict row = y + t * y_stride;
    for (int64_t r = 0; r < outputs; ++r) {
      const float value = kBias ? sums[t][r] + bias[r] : sums[t][r];
      row[r] = kAccumulate ? row[r] + value : value;
    }
  }
}

// sums [count][16] of one tile to the rows of y from `token` on. Out of line: inlined for every width it was most of the code.
__attribute__((noinline)) void add_rows(const mlspec_linear_args& a, int64_t tile, int64_t token, int count,
                                        const float (*sums)[kTileOutputs]) {
  const int64_t first = tile * kTileOutputs, outputs = std::min(a.out_features - first, kTileOutputs);
  float* const y = a.y + token * a.y_stride + first;
  if (outputs == kTileOutputs && !a.bias && !a.accumulate) {
    add_outputs<false, false>(sums, nullptr, kTileOutputs, count, a.y_stride, y);
  } else if (outputs == kTileOutputs && !a.bias) {
    add_outputs<false, true>(sums, nullptr, kTileOutputs, count, a.y_stride, y);
  } else if (!a.bias) {
    a.accumulate ? add_outputs<false, true>(sums, nullptr, outputs, count, a.y_stride, y)
                 : add_outputs<false, false>(sums, nullptr, outputs, count, a.y_stride, y);
  } else {
    a.accumulate ? add_outputs<true, true>(sums, a.bias + first, outputs, count, a.y_stride, y)
                 : add_outputs<true, false>(sums, a.bias + first, outputs, count, a.y_stride, y);
  }
}

// The activations of the tokens of one part, in the order of use: one stream, constant distances. Rows whose length is
// a multiple of 4096 bytes would share one set of the L1 cache.
struct Part {
  const int8_t* codes;         // [in / 32][N][32]
  const float* scales;         // [groups][N]
  const int32_t* corrections;  // [groups][N]: -offset * sum(x), or sum(x) where `prepared` is false
  bool prepared;
};

template <int N>
inline void store_tile(const mlspec_linear_args& a, int64_t tile, int64_t token,
                       const Isa::Float (&acc)[Isa::kVectors][N]) {
  alignas(64) float sums[N][kTileOutputs];
#pragma GCC unroll 16
  for (int t = 0; t < N; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < Isa::kVectors; ++v) Isa::store(sums[t] + v * kLanes, acc[v][t]);
  }
  add_rows(a, tile, token, N, sums);
}

template <class Format, int N>
inline __attribute__((always_inline)) void start_dots(const mlspec_linear_args& a, int64_t at, bool prepared,
                                                      const int32_t* corrections, Isa::Int (&dots)[N]) {
  if (prepared) {
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) dots[t] = Isa::broadcast(corrections[t]);
  } else {
    const Isa::Int minus_zero = Format::minus_zero(a, at);
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) dots[t] = Isa::low_products(minus_zero, Isa::broadcast(corrections[t]));
  }
}

// T tiles of 16 outputs times N tokens, over all of in_features.
template <class Format, int T, int N>
void multiply(const mlspec_linear_args& a, const Part& part, int64_t tile, int64_t token) {
  constexpr int V = Isa::kVectors;
  const int64_t blocks = a.in_features / kBlock, tile_bytes = blocks * Format::kBlockBytes;
  const int64_t group_blocks = Format::blocks_per_group(a), groups = blocks / group_blocks;
  const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + tile * tile_bytes;
  const int8_t* x = part.codes;
  const auto unpack = Format::unpack(a);
  const TileStreams streams(tile_bytes, T, Format::kAhead);
  typename Isa::Float acc[T][V][N];
#pragma GCC unroll 4
  for (int i = 0; i < T * V; ++i) {
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t) acc[i / V][i % V][t] = Isa::zeros();
  }
  for (int64_t g = 0; g < groups; ++g) {
    typename Isa::Int dots[T][V][N];
#pragma GCC unroll 4
    for (int i = 0; i < T * V; ++i) {
      const int64_t at = Format::scale_row(a, tile + i / V, g, groups) * kTileOutputs + i % V * kLanes;
      start_dots<Format, N>(a, at, part.prepared, part.corrections + g * N, dots[i / V][i % V]);
    }
    for (int64_t b = 0; b < group_blocks; ++b, weight += Format::kBlockBytes, x += N * kBlock) {
      const int64_t ahead = streams.distance((g * group_blocks + b) * Format::kBlockBytes);
      alignas(64) int8_t room[N * kBlock];
      const int8_t* const own = Format::template in_order<N>(x, room);
#pragma GCC unroll 4
      for (int i = 0; i < T * V; ++i) {
        const uint8_t* w = weight + i / V * tile_bytes;
        if (i % V == 0) Format::prefetch(a, w + ahead);
        Format::template add_block<N>(unpack, w + i % V * kLanes * 4, own, dots[i / V][i % V]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < T * V; ++i) {
      const auto scale = Format::scale(a, Format::scale_row(a, tile + i / V, g, groups) * kTileOutputs + i % V * kLanes);
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) {
        auto& sum = acc[i / V][i % V][t];
        sum = Isa::fma(Isa::to_float(dots[i / V][i % V][t]), Isa::times(scale, part.scales[g * N + t]), sum);
      }
    }
  }
#pragma GCC unroll 2
  for (int i = 0; i < T; ++i) store_tile<N>(a, tile + i, token, acc[i]);
}

template <class Format, int N>
void multiply_tiles(const mlspec_linear_args& a, const Part& part, int64_t tile, int64_t tile_end, int64_t token) {
  constexpr int T = Isa::tiles_for(N);
  for (; tile + T <= tile_end; tile += T) multiply<Format, T, N>(a, part, tile, token);
  if constexpr (T > 1) {
    for (; tile < tile_end; ++tile) multiply<Format, 1, N>(a, part, tile, token);
  }
}

constexpr int64_t kPartBytes = 256 * 1024;  // of stack; 12 tokens of 17,400 elements

// Fills space. One token is in order already, so that its length has no limit.
template <class Format, int N>
Part arrange(const mlspec_linear_args& a, int64_t token, char* space) {
  const int64_t in = a.in_features, blocks = in / kBlock, groups = mlspec_groups(a.acts);
  const int64_t offset = Format::offset(a);
  const int8_t* codes = mlspec_acts_codes(a.acts) + token * in;
  const float* scales = mlspec_acts_scales(a.acts) + token * groups;
  const int32_t* sums = mlspec_acts_sums(a.acts) + token * groups;
  const bool fits = N * groups * 4 <= kPartBytes;
  if (N == 1 && (offset == kVaries || !fits)) return {codes, scales, sums, false};
  int32_t* corrections = reinterpret_cast<int32_t*>(space);
  const int32_t factor = offset == kVaries ? 1 : static_cast<int32_t>(-offset);
  for (int64_t g = 0; g < groups; ++g) {
    for (int t = 0; t < N; ++t) corrections[g * N + t] = factor * sums[t * groups + g];
  }
  if (N == 1) return {codes, scales, corrections, true};
  float* part_scales = reinterpret_cast<float*>(space + mlspec_align64(N * groups * 4));
  for (int64_t g = 0; g < groups; ++g) {
    for (int t = 0; t < N; ++t) part_scales[g * N + t] = scales[t * groups + g];
  }
  char* part_codes = space + 2 * mlspec_align64(N * groups * 4);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int t = 0; t < N; ++t) {
      std::memcpy(part_codes + (b * N + t) * kBlock, codes + t * in + b * kBlock, kBlock);
    }
  }
  return {reinterpret_cast<int8_t*>(part_codes), part_scales, corrections, offset != kVaries};
}

template <class Format, int N>
void part_times_tiles(const mlspec_linear_args& a, int64_t tile, int64_t tile_end, int64_t token) {
  alignas(64) char space[kPartBytes];
  multiply_tiles<Format, N>(a, arrange<Format, N>(a, token, space), tile, tile_end, token);
}

using PartFunction = void (*)(const mlspec_linear_args&, int64_t tile, int64_t tile_end, int64_t token);

template <class Format, int... N>
constexpr auto widths(std::integer_sequence<int, N...>) {
  return std::array<PartFunction, sizeof...(N)>{part_times_tiles<Format, N + 1>...};
}

// Tokens are cut into near-equal parts of at most kMaxTokens (17 = 9 + 8). A panel of outputs stays in L2 while the
// parts pass; where there is one part, the panel is everything.
template <class Format>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  static constexpr auto kWidths = widths<Format>(std::make_integer_sequence<int, Isa::kMaxTokens>());
  constexpr int64_t kPanelBytes = 512 * 1024;
  const int64_t tokens = a.acts->num_rows, tile_bytes = Format::bytes_read(a);
  const int64_t token_bytes = a.in_features + 8 * mlspec_groups(a.acts);
  const int64_t most = std::clamp<int64_t>((kPartBytes - 256) / token_bytes, 1, Isa::kMaxTokens);
  const int64_t parts = (tokens + most - 1) / most;
  const int64_t tile_end = (out_end + kTileOutputs - 1) / kTileOutputs;
  const int64_t panel = parts == 1 ? tile_end : std::max<int64_t>(4, kPanelBytes / tile_bytes);
  for (int64_t tile = out_begin / kTileOutputs; tile < tile_end; tile += panel) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * tokens / parts, end = (part + 1) * tokens / parts;
      kWidths[end - begin - 1](a, tile, std::min(tile + panel, tile_end), begin);
    }
  }
}

#include "../planes/planes_int8.h"

// The kernels of an instruction set that has no other way.
#define MLSPEC_INT8_LINEARS(isa)                              \
  MLSPEC_LINEAR(mxfp4_linear_int8_##isa, linear<Mxfp4>)   \
  MLSPEC_LINEAR(nested_linear_int8_##isa, linear<Nested>) \
  MLSPEC_LINEAR(int4_linear_int8_##isa, linear<Int4>)     \
  MLSPEC_LINEAR(bitplane_linear_int8_##isa, bitplane_linear_int8)
