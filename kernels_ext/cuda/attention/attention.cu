// How do the tokens of a step attend over their rows of a ragged cache? Lengths are read on the device; cost follows them.
//
// The slots of a row are chunks of 64 at absolute positions, chunk c belongs to rank c mod 8. A rank goes through its chunks in
// ascending order; the ranks' results are merged in the order 0 to 7. So a token's bits depend on its position alone: not on
// width, batch, neighbours or the slots allocated. Where tiles are few, the eight blocks of a cluster take a rank each and merge
// through each other's shared memory; where they fill the chip (and on chips without clusters) one block takes all ranks.
#include "attention_tile.cuh"
#include "attention_walk.cuh"

namespace mlspec {
namespace {

struct Lanes {
  const __nv_bfloat16 *keys, *values;
  int dim, end;  // slots from `end` on are not read

  __device__ Lanes(const AttentionArgs& a, const Tile& tile)
      : keys(static_cast<const __nv_bfloat16*>(a.cache.keys) + tile.batch_row * a.cache.key_batch_stride +
             tile.kv_head * a.cache.key_head_stride),
        values(static_cast<const __nv_bfloat16*>(a.cache.values) + tile.batch_row * a.cache.value_batch_stride +
               tile.kv_head * a.cache.value_head_stride),
        dim(int(a.cache.dim)),
        end(tile.end_slot()) {}
};

// 64 slots of keys or values, zeros behind the end and behind the head's elements.
template <class Shape>
__device__ __forceinline__ void load_slots(uint32_t to, const __nv_bfloat16* from, int first_slot, int dim, int end) {
  constexpr int kVectors = Shape::kDim / kVector;
#pragma unroll 8
  for (int i = threadIdx.x; i < kChunk * kVectors; i += kAttendThreads) {
    const int slot = i / kVectors, element = i % kVectors * kVector;
    const bool inside = first_slot + slot < end && element < dim;
    copy_async(to + uint32_t(slot * Shape::kStride + element) * 2,
               inside ? from + int64_t(first_slot + slot) * dim + element : from, inside);
  }
}

// Always two groups of copies, so that waiting is counting.
template <class Shape>
__device__ __forceinline__ void load_stage(uint32_t stage, const Lanes& lanes, Walk& ahead) {
  if (!ahead.done()) load_slots<Shape>(stage, lanes.keys, ahead.chunk * kChunk, lanes.dim, lanes.end);
  commit_copies();
  if (!ahead.done()) {
    load_slots<Shape>(stage + Shape::kLaneBytes, lanes.values, ahead.chunk * kChunk, lanes.dim, lanes.end);
    ahead.next();
  }
  commit_copies();
}

template <class Shape>
__device__ __forceinline__ void load_queries(const AttentionArgs& a, const Tile& tile, uint32_t to) {
  constexpr int kVectors = Shape::kDim / kVector;
  const int dim = int(a.cache.dim);
  for (int i = threadIdx.x; i < Shape::kRows * kVectors; i += kAttendThreads) {
    const int row = i / kVectors, element = i % kVectors * kVector, token = (tile.first_row + row) / a.group;
    const int64_t at = (tile.batch_row * a.tokens.width + token) * a.heads + tile.kv_head * a.group +
                       (tile.first_row + row) % a.group;
    const bool inside = token < tile.end_token && element < dim;
    copy_async(to + uint32_t(row * Shape::kStride + element) * 2, inside ? a.q + at * dim + element : a.q, inside);
  }
}

// What was written by kernels long done comes near while the kernel in front still runs. The lengths may be old then: they only
// say which lines of the cache are likely to be read.
template <class Shape>
__device__ __forceinline__ void prefetch(const AttentionArgs& a) {
  const Tile guess(a, Shape::kRows);
  if (guess.is_padding()) return;
  const Lanes lanes(a, guess);
  const int chunk = guess.first_chunk(a.rule.window) + guess.rank;
  const int bytes = min(kChunk, lanes.end - chunk * kChunk) * lanes.dim * 2;
  const int64_t from = int64_t(chunk) * kChunk * lanes.dim;
  for (int at = threadIdx.x * 128; at < bytes; at += kAttendThreads * 128) {
    prefetch_line(reinterpret_cast<const char*>(lanes.keys + from) + at);
    prefetch_line(reinterpret_cast<const char*>(lanes.values + from) + at);
  }
}

template <class Shape>
__device__ __forceinline__ void write_padding(const AttentionArgs& a, const Tile& tile) {
  for (int i = threadIdx.x * 2; i < Shape::kRows * Shape::kDim; i += kAttendThreads * 2)
    if (i / 2 / kAttendThreads % a.ranks == tile.rank) write_pair(a, tile, i / Shape::kDim, i % Shape::kDim, 0.f, 0.f);
}

template <class Shape>
__device__ __forceinline__ void merge(Attended<Shape>& all, const Attended<Shape>& rank) {
#pragma unroll
  for (int i = 0; i < Shape::kTiles; ++i) {
    const Merge rows[2] = {{all.largest[i][0], rank.largest[i][0]}, {all.largest[i][1], rank.largest[i][1]}};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      all.largest[i][r] = rows[r].largest;
      all.sum[i][r] = rows[r](all.sum[i][r], rank.sum[i][r]);
    }
#pragma unroll
    for (int n = 0; n < Shape::kOutTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) all.out[i][n][e] = rows[e / 2](all.out[i][n][e], rank.out[i][n][e]);
  }
}

// f(row of the tile, element, low and high sum, sum of weights, maximum) for what this thread holds.
template <class Shape, class F>
__device__ __forceinline__ void for_each_pair(const Attended<Shape>& state, F f) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < Shape::kOutTiles; ++n)
        f(i * 16 + r * 8 + lane / 4, (warp * Shape::kOutTiles + n) * 8 + lane % 4 * 2, state.out[i][n][2 * r],
          state.out[i][n][2 * r + 1], state.sum[i][r], state.largest[i][r]);
}

// Each block of the cluster merges and writes an eighth of the tile. sums [rows][kOutStride], stats float4 [rows].
template <class Shape>
__device__ __forceinline__ void merge_cluster(const AttentionArgs& a, const Tile& tile, const Attended<Shape>& own, float* sums,
                                              float4* stats) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  for_each_pair(own, [&](int row, int element, float low, float high, float sum, float largest) {
    *reinterpret_cast<float2*>(sums + row * Shape::kOutStride + element) = {low, high};
    if (element == 0) stats[row] = {largest, sum, 0.f, 0.f};
  });
  cluster_sync();
  constexpr int kFours = Shape::kRows * Shape::kDim / 4 / kRanks;
  for (int i = threadIdx.x; i < kFours; i += kAttendThreads) {
    const int four = tile.rank * kFours + i, row = four / (Shape::kDim / 4), element = four % (Shape::kDim / 4) * 4;
    float4 outs[kRanks], numbers[kRanks];
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      outs[rank] = load_cluster(shared_address(sums + row * Shape::kOutStride + element), rank);
      numbers[rank] = load_cluster(shared_address(stats + row), rank);
    }
    float largest = -CUDART_INF_F, sum = 0.f, x = 0.f, y = 0.f, z = 0.f, w = 0.f;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      const Merge with(largest, numbers[rank].x);
      largest = with.largest;
      sum = with(sum, numbers[rank].y);
      x = with(x, outs[rank].x), y = with(y, outs[rank].y), z = with(z, outs[rank].z), w = with(w, outs[rank].w);
    }
    write_pair(a, tile, row, element, finished(x, sum), finished(y, sum));
    write_pair(a, tile, row, element + 2, finished(z, sum), finished(w, sum));
  }
  cluster_exit();  // nobody leaves whose memory is still read
#endif
}

// The last position each of this thread's rows may see; -1 for padding.
template <class Shape>
__device__ __forceinline__ void find_limits(const AttentionArgs& a, const Tile& tile, int (&limit)[Shape::kTiles][2]) {
#pragma unroll
  for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = (tile.first_row + i * 16 + r * 8 + int(threadIdx.x) % kWarp / 4) / a.group;
      limit[i][r] = token < tile.end_token ? tile.start + token : -1;
    }
}

template <class Shape>
__global__ void __launch_bounds__(kAttendThreads) attention_kernel(const AttentionArgs a) {
  extern __shared__ uint4 memory[];
  char* const shared = reinterpret_cast<char*>(memory);
  char* const stages = shared + Shape::kQueryBytes + Shape::kWeightBytes + 2 * Shape::kWarpBytes + Shape::kStatBytes;
  float* const maxima = reinterpret_cast<float*>(shared + Shape::kQueryBytes + Shape::kWeightBytes);
  const AttentionBlock<Shape> block{shared_address(shared), shared_address(shared + Shape::kQueryBytes), maxima,
                                    maxima + kAttendWarps * Shape::kRows};
  launch_dependents();
  prefetch<Shape>(a);
  wait_for_previous_kernel();
  const Tile tile(a, Shape::kRows);
  if (tile.is_padding()) return write_padding<Shape>(a, tile);  // every block of the cluster
  const Lanes lanes(a, tile);
  const int low = tile.first_chunk(a.rule.window), high = (tile.end_slot() - 1) / kChunk;
  Walk walk(low, high, tile.rank, a.ranks == 1 ? kRanks : tile.rank + 1), ahead = walk;
  load_queries<Shape>(a, tile, block.queries);
  for (int s = 0; s < a.stages; ++s) load_stage<Shape>(shared_address(stages) + s * Shape::kStageBytes, lanes, ahead);
  int limit[Shape::kTiles][2];
  find_limits<Shape>(a, tile, limit);
  Attended<Shape> all, own;
  all.clear();
  own.clear();
  for (int stage = 0; !walk.done(); stage = stage + 1 == a.stages ? 0 : stage + 1) {
    const uint32_t keys = shared_address(stages) + stage * Shape::kStageBytes;
    float scores[Shape::kTiles][2][4], factor[Shape::kTiles][2];
    a.stages == 1 ? wait_for_copies<1>() : wait_for_copies<3>();
    __syncthreads();  // keys are here
    block.multiply_keys(keys, scores);
    block.score(a.rule, walk.chunk * kChunk, limit, scores);
    __syncthreads();  // maxima are here
    block.weigh(a.rule, scores, own, factor);
    a.stages == 1 ? wait_for_copies<0>() : wait_for_copies<2>();
    __syncthreads();  // weights and values are here
    block.multiply_values(keys + Shape::kLaneBytes, factor, own);
    const int rank = walk.rank;
    walk.next();
    if (a.ranks == 1 && walk.rank != rank) {
      block.complete_sums(own);
      merge(all, own);
      own.clear();
    }
    if (!walk.done()) __syncthreads();  // the stage was read
    load_stage<Shape>(keys, lanes, ahead);
  }
  wait_for_copies<0>();
  if (a.ranks == 1) {
    for_each_pair(all, [&](int row, int element, float low_sum, float high_sum, float sum, float) {
      write_pair(a, tile, row, element, finished(low_sum, sum), finished(high_sum, sum));
    });
  } else {
    __syncthreads();  // the first stage was read
    block.complete_sums(own);
    merge_cluster(a, tile, own, reinterpret_cast<float*>(stages), reinterpret_cast<float4*>(stages - Shape::kStatBytes));
  }
}

template <class Shape>
const char* launch_attention(AttentionArgs args, int64_t rows, const mlspec_cuda_attention& attention,
                             const mlspec_cuda_row_launch& how) {
  const int64_t batch = args.cache.batch, kv_heads = args.cache.kv_heads;
  args.tiles = int((rows + Shape::kRows - 1) / Shape::kRows);
  const bool few = args.tiles * batch * kv_heads < attention.multiprocessors * 3 / 4;
  args.ranks = !how.clusters ? 1 : attention.ranks ? attention.ranks : few ? kRanks : 1;
  const int64_t chunks = (args.cache.slots + kChunk - 1) / kChunk;
  args.stages = chunks <= args.ranks || Shape::shared_bytes(2) > attention.shared_bytes ? 1 : 2;
  if (Shape::shared_bytes(args.stages) > attention.shared_bytes) return "a block needs more shared memory than this GPU has";
  const RowGrid grid{dim3(unsigned(args.tiles * args.ranks), unsigned(kv_heads), unsigned(batch)), kAttendThreads,
                     unsigned(Shape::shared_bytes(args.stages)), unsigned(args.ranks)};
  return launch_rows(how, grid, attention_kernel<Shape>, args);
}

// Small tiles where blocks are few: then more of them work side by side. Bits do not depend on it.
template <int kDim>
const char* launch_tiles(const AttentionArgs& args, const mlspec_cuda_attention& attention, const mlspec_cuda_row_launch& how) {
  const int64_t rows = args.tokens.width * args.group;
  if (rows <= 16) return launch_attention<AttentionShape<kDim, 1>>(args, rows, attention, how);
  if constexpr (kDim <= 128)
    if (rows > 32 && (rows + 31) / 32 * args.cache.batch * args.cache.kv_heads >= attention.multiprocessors * 3 / 4)
      return launch_attention<AttentionShape<kDim, 4>>(args, rows, attention, how);
  return launch_attention<AttentionShape<kDim, 2>>(args, rows, attention, how);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_ragged_attention_rows(const mlspec_cuda_attention* attention, const mlspec_cuda_tokens* tokens,
                                              const mlspec_cuda_cache* cache, const mlspec_cuda_row_launch* how) {
  AttentionArgs args;
  if (const char* problem = read_arguments(&args, *attention, *tokens, *cache)) return problem;
  if (attention->ranks != 0 && attention->ranks != 1 && attention->ranks != kRanks) return "ranks must be 0, 1 or 8";
  if (cache->dim <= 64) return launch_tiles<64>(args, *attention, *how);
  return cache->dim <= 128 ? launch_tiles<128>(args, *attention, *how) : launch_tiles<256>(args, *attention, *how);
}
