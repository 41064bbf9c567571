// How do the tokens of a step attend over their rows of a ragged cache? Lengths are read on the device; cost follows them.
//
// The slots of a row are spans of 32 at absolute positions; span s belongs to rank s mod 32, rank k to class k mod 8. A rank goes
// through its spans in ascending order; the four ranks of a class are merged in ascending order, then the eight classes. So a
// token's bits depend on its position alone: not on width, batch, neighbours or the slots allocated, nor on how the work is
// divided. Where tiles are few, a cluster of eight blocks takes a tile, each block a class and each warp a rank; else a block
// takes it and each warp a class.
#include <type_traits>

#include "attention_states.cuh"

namespace mlspec {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

enum Division { kChosen, kCluster, kBlock };  // mlspec_cuda_attention.division

struct AttentionArgs {
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  mlspec_cuda_tokens tokens;
  mlspec_cuda_cache cache;
  ScoreRule rule;
  int heads, group;  // query heads, and of one key head
  int tiles;

  __device__ Lanes lanes(int batch_row, int kv_head) const {
    return {static_cast<const __nv_bfloat16*>(cache.keys) + batch_row * cache.key_batch_stride + kv_head * cache.key_head_stride,
            static_cast<const __nv_bfloat16*>(cache.values) + batch_row * cache.value_batch_stride +
                kv_head * cache.value_head_stride,
            int(cache.dim), int(cache.slots)};
  }
};

// Rows [first_row, + kRows) of tokens x group, of one key head of one row of the batch.
struct Tile {
  int batch_row, kv_head, first_row;
  int start;                   // of the batch row
  int first_token, end_token;  // real tokens that have rows here

  __device__ Tile(const AttentionArgs& a, int index, int rows) {
    first_row = (a.tiles - 1 - index) * rows;  // the last tokens see most: they start first
    kv_head = blockIdx.y;
    batch_row = blockIdx.z;
    read_lengths(a, rows);
  }

  // Volatile: read anew behind wait_for_previous_kernel(), in front of which they may have been old.
  __device__ void read_lengths(const AttentionArgs& a, int rows) {
    start = reinterpret_cast<const volatile int32_t*>(a.tokens.starts)[batch_row];
    const int64_t asked = reinterpret_cast<const volatile int32_t*>(a.tokens.counts)[batch_row];
    const int64_t room = start < 0 ? 0 : a.cache.slots - start;
    first_token = first_row / a.group;
    end_token = min(int(min(min(asked, a.tokens.width), room)), (first_row + rows + a.group - 1) / a.group);
  }

  __device__ bool is_padding() const { return first_token >= end_token; }
  __device__ int end_slot() const { return start + end_token; }
};

// The spans that a tile sees: [low, high].
struct Spans {
  int low, high;

  __device__ Spans(const Tile& tile, int window)
      : low(window == 0 ? 0 : max(0, tile.start + tile.first_token - window + 1) / kSpan),
        high(tile.is_padding() ? -1 : (tile.end_slot() - 1) / kSpan) {}
  __device__ int first_of_rank(int rank) const { return low + ((rank - low) & (kRanks - 1)); }
  __device__ bool has_rank(int rank) const { return first_of_rank(rank) <= high; }
  __device__ bool has_class(int index) const { return low + ((index - low) & (kClasses - 1)) <= high; }
};

// The spans of ranks [rank, end) of one class, rank by rank.
struct Walk {
  Spans spans;
  int rank, end, span;

  __device__ Walk(const Spans& spans_, int rank_, int ranks)
      : spans(spans_), rank(rank_), end(rank_ + ranks * kClasses), span(spans_.first_of_rank(rank_)) {
    settle();
  }
  __device__ void settle() {
    while (span > spans.high && (rank += kClasses) < end) span = spans.first_of_rank(rank);
  }
  __device__ bool done() const { return rank >= end; }
  __device__ void next() {
    span += kRanks;
    settle();
  }
};

// Brings a span near. In front of wait_for_previous_kernel() the lengths may be old: they only say what is likely to be read.
__device__ __forceinline__ void prefetch(const Lanes& lanes, const Walk& walk) {
  if (walk.done()) return;
  const int64_t first = int64_t(walk.span) * kSpan;
  const int bytes = int(min(int64_t(kSpan), lanes.slots - first)) * lanes.dim * 2;
#pragma unroll 1
  for (int at = int(threadIdx.x) % kWarp * 128; at < bytes; at += kWarp * 128) {
    prefetch_line(reinterpret_cast<const char*>(lanes.keys + first * lanes.dim) + at);
    prefetch_line(reinterpret_cast<const char*>(lanes.values + first * lanes.dim) + at);
  }
}

template <class Shape>
__device__ __forceinline__ void load_queries(const AttentionArgs& a, const Tile& tile, Queries<Shape>& queries) {
  const int lane = threadIdx.x % kWarp, dim = int(a.cache.dim);
#pragma unroll
  for (int t = 0; t < Shape::kTiles; ++t) {
    const int row = tile.first_row + t * 8 + lane / 4, token = row / a.group;
    const __nv_bfloat16* const from =
        a.q + ((tile.batch_row * a.tokens.width + token) * a.heads + tile.kv_head * a.group + row % a.group) * dim;
#pragma unroll
    for (int i = 0; i < Shape::kKeyVectors; ++i) {
      const int element = i * 32 + lane % 4 * 8;
      queries.vectors[t][i] = token < a.tokens.width && element < dim ? *reinterpret_cast<const uint4*>(from + element)
                                                                      : make_uint4(0, 0, 0, 0);
    }
  }
}

template <class Shape>
__device__ __forceinline__ void find_limits(const AttentionArgs& a, const Tile& tile, Queries<Shape>& queries) {
#pragma unroll
  for (int t = 0; t < Shape::kTiles; ++t)
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int token = (tile.first_row + t * 8 + int(threadIdx.x) % 4 * 2 + p) / a.group;
      queries.limit[t][p] = token < tile.end_token ? tile.start + token : -1;
    }
}

// An item of the result; rows and elements behind the tensor's are dropped.
template <class Shape>
__device__ __forceinline__ void write_item(const AttentionArgs& a, const Tile& tile, int item, float4 sums, float sum) {
  const int row = tile.first_row + row_of<Shape>(item), token = row / a.group, element = Attended<Shape>::element_of(item);
  if (token >= a.tokens.width || element >= a.cache.dim) return;
  const int64_t at = (tile.batch_row * a.tokens.width + token) * a.heads + tile.kv_head * a.group + row % a.group;
  *reinterpret_cast<uint2*>(a.out + at * a.cache.dim + element) =
      make_uint2(narrowed(finished(sums.x, sum), finished(sums.y, sum)), narrowed(finished(sums.z, sum), finished(sums.w, sum)));
}

// Items index, index + of, ...: a warp's share of a tile of padding.
template <class Shape>
__device__ __forceinline__ void write_padding(const AttentionArgs& a, const Tile& tile, int index, int of) {
  for (int item = index; item < Shape::kItems; item += of) write_item<Shape>(a, tile, item, make_float4(0.f, 0.f, 0.f, 0.f), 0.f);
}

// Elements of a head times tiles up to which a span's keys and values fit into registers.
constexpr int kAtOnce = 128;
template <class Shape>
using SpanOf = std::conditional_t<(Shape::kDim * Shape::kTiles <= kAtOnce), Span<Shape>, SpanInParts<Shape>>;

// All spans of a class, by one warp.
template <class Shape>
__device__ __forceinline__ void attend_class(const AttentionArgs& a, const Lanes& lanes, const Spans& spans, int end, int index,
                                             const Queries<Shape>& queries, Kept<Shape>& kept) {
  Attended<Shape> own;
  own.clear();
  for (Walk walk(spans, index, kRanksOfClass); !walk.done();) {
    const int rank = walk.rank, first = walk.span * kSpan;
    walk.next();
    prefetch(lanes, walk);
    SpanOf<Shape> span;
    span.load(lanes, first);
    span.attend(lanes, first, end, a.rule, queries, own);
    if (walk.rank == rank) continue;
    own.finish_sums();
    kept.take(own);
    own.clear();
  }
}

template <class Shape>
__global__ void __launch_bounds__(kClasses* kWarp, 1) attend_block_kernel(const AttentionArgs a) {
  extern __shared__ uint4 memory[];
  const States<Shape> states(memory, kClasses);
  const int warp = threadIdx.x / kWarp;
  launch_dependents();
  const Lanes lanes = a.lanes(blockIdx.z, blockIdx.y);
  prefetch(lanes, Walk(Spans(Tile(a, blockIdx.x, Shape::kRows), a.rule.window), warp, kRanksOfClass));
  wait_for_previous_kernel();
  const Tile tile(a, blockIdx.x, Shape::kRows);
  if (tile.is_padding()) return write_padding<Shape>(a, tile, warp, kClasses);
  const Spans spans(tile, a.rule.window);
  Queries<Shape> queries;
  load_queries<Shape>(a, tile, queries);
  find_limits<Shape>(a, tile, queries);
  Kept<Shape> kept(states.of(warp));
  attend_class<Shape>(a, lanes, spans, tile.end_slot(), warp, queries, kept);
  states.write_stats(warp, kept);
  __syncthreads();
  for (int item = warp; item < Shape::kItems; item += kClasses) {
    Merged all = Merged::none();
#pragma unroll
    for (int c = 0; c < kClasses; ++c)
      if (spans.has_class(c)) states.add_to(all, c, item);
    write_item<Shape>(a, tile, item, all.out, all.sum);
  }
}

template <class Shape>
__device__ __forceinline__ void merge_cluster(const AttentionArgs& a, const Tile& tile, const Spans& spans,
                                              const States<Shape>& states, const Inbox<Shape>& inbox) {
  const int warp = threadIdx.x / kWarp, index = blockIdx.x % kClasses;
  if (spans.has_class(index))
    for (int item = warp; item < Shape::kItems; item += kRanksOfClass) {
      Merged all = Merged::none();
#pragma unroll
      for (int r = 0; r < kRanksOfClass; ++r)
        if (spans.has_rank(index + r * kClasses)) states.add_to(all, r, item);
      inbox.send(index, item, all);
    }
  cluster_arrive();
  cluster_wait();  // everything has come
  for (int item = index + warp * kClasses; item < Shape::kItems; item += kRanks) {
    Merged all = Merged::none();
#pragma unroll
    for (int c = 0; c < kClasses; ++c)
      if (spans.has_class(c)) all.take(inbox.stats[inbox.place(c, item)], inbox.items[inbox.place(c, item)]);
    write_item<Shape>(a, tile, item, all.out, all.sum);
  }
}

// All spans of a rank, by one warp; the first one is loaded.
template <class Shape>
__device__ __forceinline__ void attend_rank(const AttentionArgs& a, const Lanes& lanes, Walk& walk, int end,
                                            const Queries<Shape>& queries, SpanOf<Shape>& span, const States<Shape>& states) {
  Attended<Shape> own;
  own.clear();
  while (true) {
    const int first = walk.span * kSpan;
    walk.next();
    prefetch(lanes, walk);
    span.attend(lanes, first, end, a.rule, queries, own);
    if (walk.done()) break;
    span.load(lanes, walk.span * kSpan);
  }
  own.finish_sums();
  Kept<Shape>(states.of(threadIdx.x / kWarp)).take(own);
  states.write_stats(threadIdx.x / kWarp, own);
}

template <class Shape>
__global__ void __launch_bounds__(kRanksOfClass* kWarp, 2) attend_cluster_kernel(const AttentionArgs a) {
  extern __shared__ uint4 memory[];
  const States<Shape> states(memory, kRanksOfClass);
  const Inbox<Shape> inbox(reinterpret_cast<char*>(memory) + kRanksOfClass * States<Shape>::kBytes);
  const int warp = threadIdx.x / kWarp, rank = blockIdx.x % kClasses + warp * kClasses;
  launch_dependents();
  cluster_arrive_relaxed();
  const Lanes lanes = a.lanes(blockIdx.z, blockIdx.y);
  const Tile old(a, blockIdx.x / kClasses, Shape::kRows);
  const Walk guess(Spans(old, a.rule.window), rank, 1);
  prefetch(lanes, guess);
  wait_for_previous_kernel();
  const Tile tile(a, blockIdx.x / kClasses, Shape::kRows);
  Queries<Shape> queries;
  SpanOf<Shape> span;
  if (!guess.done()) {  // most often right: the loads need not wait for the lengths
    span.load(lanes, guess.span * kSpan);
    load_queries<Shape>(a, old, queries);
  }
  const Spans spans(tile, a.rule.window);
  Walk walk(spans, rank, 1);
  if (!walk.done()) {
    if (guess.done()) load_queries<Shape>(a, tile, queries);
    if (guess.done() || guess.span != walk.span) span.load(lanes, walk.span * kSpan);
    find_limits<Shape>(a, tile, queries);
    attend_rank<Shape>(a, lanes, walk, tile.end_slot(), queries, span, states);
  }
  cluster_wait();  // all blocks run: they may be written to
  if (tile.is_padding()) return write_padding<Shape>(a, tile, rank, kRanks);
  __syncthreads();
  merge_cluster<Shape>(a, tile, spans, states, inbox);
}

template <class Shape>
const char* launch_cluster(AttentionArgs args, int64_t tiles, const mlspec_cuda_row_launch& how) {
  args.tiles = int(tiles);
  const RowGrid grid{dim3(unsigned(tiles * kClasses), unsigned(args.cache.kv_heads), unsigned(args.cache.batch)),
                     kRanksOfClass * kWarp, unsigned(kRanksOfClass * States<Shape>::kBytes + Inbox<Shape>::kBytes), kClasses};
  return launch_rows(how, grid, attend_cluster_kernel<Shape>, args);
}

template <class Shape>
const char* launch_block(AttentionArgs args, int64_t tiles, int shared_bytes, const mlspec_cuda_row_launch& how) {
  args.tiles = int(tiles);
  if (kClasses * States<Shape>::kBytes > shared_bytes) return "a block needs more shared memory than this GPU has";
  const RowGrid grid{dim3(unsigned(tiles), unsigned(args.cache.kv_heads), unsigned(args.cache.batch)), kClasses * kWarp,
                     unsigned(kClasses * States<Shape>::kBytes)};
  return launch_rows(how, grid, attend_block_kernel<Shape>, args);
}

// A cluster where all blocks run at once, two on a multiprocessor; wider tiles read the cache less often.
template <int kDim, bool kWhole>
const char* launch_tiles(const AttentionArgs& args, const mlspec_cuda_attention& attention, const mlspec_cuda_row_launch& how) {
  constexpr int kWide = kDim > 128 ? 1 : 2;
  using Narrow = AttentionShape<kDim, 1, kWhole>;
  using Wide = AttentionShape<kDim, kWide, kWhole>;
  const int64_t rows = args.tokens.width * args.group, pairs = args.cache.batch * args.cache.kv_heads;
  const bool narrow = rows <= Narrow::kRows;
  const int64_t tile = narrow ? Narrow::kRows : Wide::kRows, tiles = (rows + tile - 1) / tile;
  const bool few = tiles * pairs * kClasses <= 2 * attention.multiprocessors;
  const bool shared = attention.division == kChosen ? few : attention.division == kCluster;
  if (shared && how.clusters) return narrow ? launch_cluster<Narrow>(args, tiles, how) : launch_cluster<Wide>(args, tiles, how);
  return narrow ? launch_block<Narrow>(args, tiles, attention.shared_bytes, how)
                : launch_block<Wide>(args, tiles, attention.shared_bytes, how);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_ragged_attention_rows(const mlspec_cuda_attention* attention, const mlspec_cuda_tokens* tokens,
                                              const mlspec_cuda_cache* cache, const mlspec_cuda_row_launch* how) {
  if (cache->dim % 16 || cache->dim < 16 || cache->dim > 256) return "head_dim must be a multiple of 16 up to 256";
  if (cache->batch > 65535 || cache->kv_heads > 65535) return "a call takes up to 65535 rows and key heads";
  if (cache->slots > INT32_MAX - kRanks * kSpan || tokens->width * attention->heads > INT32_MAX / kClasses)
    return "a row has too many slots or queries for 32-bit numbers";
  if (attention->division < kChosen || attention->division > kBlock) return "division must be 0, 1 or 2";
  const bool capped = attention->softcap > 0.f;
  const ScoreRule rule{capped ? attention->scale / attention->softcap : attention->scale * kLog2E, attention->softcap * kLog2E,
                       capped, int(attention->window < INT32_MAX ? attention->window : 0)};
  const AttentionArgs args{static_cast<const __nv_bfloat16*>(attention->q), static_cast<__nv_bfloat16*>(attention->out), *tokens,
                           *cache, rule, int(attention->heads), int(attention->heads / cache->kv_heads), 0};
  const int64_t dim = cache->dim;
  if (dim == 64) return launch_tiles<64, true>(args, *attention, *how);
  if (dim == 128) return launch_tiles<128, true>(args, *attention, *how);
  if (dim == 256) return launch_tiles<256, true>(args, *attention, *how);
  if (dim < 64) return launch_tiles<64, false>(args, *attention, *how);
  return dim < 128 ? launch_tiles<128, false>(args, *attention, *how) : launch_tiles<256, false>(args, *attention, *how);
}
