// How is an exact product with a nested weight summed? Its rows are rebuilt piece by piece, then added up as bf16_linear does.
//
// Included by each nested_linear_<isa>.cpp inside its anonymous namespace, after `Isa`. bf16_linear keeps a row's elements in
// lanes; here a lane is an output and the same sums lie in as many vectors. Isa has Sum (kLanes = 16 / kVectors outputs),
//   kSums                  sums that bf16_linear gives a row, counted in pairs of neighbours: pair p adds to sum p % kSums
//   kMaxTokens, sums_for(tokens)    activation rows of a part; of kSums, how many at a time are kept in registers
//   Activations            a block of one row as fma reads it;   arrange(x, Activations&) makes it of 32 bfloat16
//   rebuild(nibbles, exponents, low, pairs)    one step of a tile (kernels.h) to [16 pairs][16 outputs][2] bfloat16
//   load(const float*), store(float*, Sum)     sizeof(Sum) bytes
//   load_pairs(p), fma(w, Activations, pair, sum)    the products that bf16_linear adds of a pair, in its order
//   store_total(const Sum[kSums], float*)      the sum of a row's sums, by bf16_linear's tree
//   prefetch(p)

#include "nested_steps.h"

constexpr int64_t kChunk = 8;                           // steps that are rebuilt at a time: 8 KB, to be read from L1
constexpr int64_t kAhead = 8;                           // steps from those that are rebuilt to those that are fetched
constexpr int64_t kPassTokens = 96;                     // activation rows that share one rebuilding: their sums stay in L2
constexpr int kLanes = 16 / Isa::kVectors;
constexpr int64_t kSumFloats = sizeof(typename Isa::Sum) / sizeof(float);
constexpr int64_t kTokenFloats = Isa::kVectors * Isa::kSums * kSumFloats;

// Some of the sums of N rows, over `count` steps. Meanwhile what will be rebuilt next is fetched, unless `ahead` is null: while
// weights are rebuilt the processor has other things to do, and it takes few requests at a time.
template <int P, int N>
inline void add_sums(const Pairs* pairs, const typename Isa::Activations (*x)[N], int64_t count, int first_sum, int lane,
                     float* sums, const TileSteps* ahead) {
  constexpr int kTurns = Isa::kVectors * Isa::kSums / P;
  const int turn = (lane / kLanes * Isa::kSums + first_sum) / P;
  typename Isa::Sum sum[P][N];
  for (int i = 0; i < P; ++i)
    for (int t = 0; t < N; ++t) sum[i][t] = Isa::load(sums + ((first_sum + i) * N + t) * kSumFloats);
  for (int64_t b = 0; b < count; ++b) {
    if (ahead) ahead->prefetch<kTurns>(b, turn);
#pragma GCC unroll 4
    for (int pair = first_sum; pair < kPairs; pair += Isa::kSums) {
#pragma GCC unroll 16
      for (int i = 0; i < P; ++i) {
        const auto weights = Isa::load_pairs(pairs[b][pair + i] + lane);
#pragma GCC unroll 16
        for (int t = 0; t < N; ++t) sum[i][t] = Isa::fma(weights, x[b][t], pair + i, sum[i][t]);
      }
    }
  }
  for (int i = 0; i < P; ++i)
    for (int t = 0; t < N; ++t) Isa::store(sums + ((first_sum + i) * N + t) * kSumFloats, sum[i][t]);
}

// sums of a part: [kVectors][kSums][N][kSumFloats].
template <int N>
__attribute__((noinline)) void add_chunk(const mlspec_linear_args& a, const Pairs* pairs, int64_t first, int64_t count,
                                         int64_t token, float* sums, const TileSteps* ahead) {
  constexpr int P = Isa::sums_for(N);
  alignas(64) typename Isa::Activations x[kChunk][N];
  const uint16_t* const rows = static_cast<const uint16_t*>(a.acts->data) + token * a.in_features + first * kBlock;
  for (int64_t b = 0; b < count; ++b)
    for (int t = 0; t < N; ++t) Isa::arrange(rows + t * a.in_features + b * kBlock, x[b][t]);
  for (int v = 0; v < Isa::kVectors; ++v, sums += Isa::kSums * N * kSumFloats)
    for (int s = 0; s < Isa::kSums; s += P) add_sums<P, N>(pairs, x, count, s, v * kLanes, sums, ahead);
}

void add_part(const mlspec_linear_args& a, int64_t tile, int64_t token, int64_t count, const float* sums) {
  for (int64_t t = 0; t < count; ++t) {
    alignas(64) float total[kTileOutputs];
    for (int v = 0; v < Isa::kVectors; ++v) {
      typename Isa::Sum row[Isa::kSums];
      for (int s = 0; s < Isa::kSums; ++s) row[s] = Isa::load(sums + ((v * Isa::kSums + s) * count + t) * kSumFloats);
      Isa::store_total(row, total + v * kLanes);
    }
    add_row(a, tile, token + t, total);
  }
}

using AddChunk = void (*)(const mlspec_linear_args&, const Pairs*, int64_t first, int64_t count, int64_t token, float* sums,
                          const TileSteps* ahead);

template <int... N>
constexpr auto widths(std::integer_sequence<int, N...>) {
  return std::array<AddChunk, sizeof...(N)>{add_chunk<N + 1>...};
}

// One tile times rows [begin, end), in near-equal parts of at most kMaxTokens.
void pass(const mlspec_linear_args& a, int64_t tile, int64_t begin, int64_t end, float* sums) {
  static constexpr auto kWidths = widths(std::make_integer_sequence<int, Isa::kMaxTokens>());
  const int64_t tokens = end - begin, parts = (tokens + Isa::kMaxTokens - 1) / Isa::kMaxTokens, steps = a.in_features / kBlock;
  const TileSteps tile_steps(a, tile);
  alignas(64) Pairs pairs[kChunk];
  std::fill(sums, sums + tokens * kTokenFloats, 0.0f);
  const int64_t chunk = tokens <= 6 ? kChunk / 2 : kChunk;  // few products hide few reads
  for (int64_t first = 0; first < steps; first += chunk) {
    const int64_t count = std::min(chunk, steps - first);
    for (int64_t b = 0; b < count; ++b) tile_steps.rebuild(Isa::rebuild, first + b, pairs[b]);
    const TileSteps ahead = tile_steps.from(first + kAhead);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t from = part * tokens / parts, to = (part + 1) * tokens / parts;
      kWidths[to - from - 1](a, pairs, first, count, begin + from, sums + from * kTokenFloats,
                            part == 0 ? &ahead : nullptr);
    }
  }
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = part * tokens / parts, to = (part + 1) * tokens / parts;
    add_part(a, tile, begin + from, to - from, sums + from * kTokenFloats);
  }
}

void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  alignas(64) float sums[kPassTokens * kTokenFloats];
  const int64_t tokens = a.acts->num_rows, passes = (tokens + kPassTokens - 1) / kPassTokens;
  for (int64_t tile = out_begin / kTileOutputs; tile * kTileOutputs < out_end; ++tile)
    for (int64_t i = 0; i < passes; ++i) pass(a, tile, i * tokens / passes, (i + 1) * tokens / passes, sums);
}
