// How do many tokens of a row attend, bit for bit as in attention.cu, at the speed of the tensor cores?
//
// A block has 128 query rows (tokens x query heads of one key head), 64 of each of two groups of four warps; a producer thread
// brings chunks of 64 slots by the copy engine. A group computes the weights of a chunk while the values of the chunk before are
// multiplied, and while the other group's products run (FlashAttention-3, Shah et al. 2024). Chunks come rank by rank, as in
// attention_walk.cuh.
#include "attention_prefill_rows.cuh"
#include "../tensor_map.cuh"

namespace mlspec {
namespace {

constexpr int kGroups = 2, kPrefillThreads = 128 * (kGroups + 1), kStages = 4;
constexpr int kCodedRows = 8 * kPrefillRows;  // for fewer it takes longer to widen the codes

// kDim: 64 or 128 elements of a head, in boxes of 64; what is behind its own is zero. kBits: 0, or keys and values are widened codes
// of so many bits, and what belongs to their slots stands aside (attention_codes.cuh says how it counts).
template <int kDim_, int kBits_>
struct PrefillShape {
  static constexpr int kBits = kBits_;
  static constexpr int kDim = kDim_, kBoxes = kDim / 64, kOutTiles = kDim / 8;
  static constexpr int kQueryBytes = kPrefillRows * kDim * 2, kLaneBytes = kChunk * kDim * 2, kBoxBytes = kChunk * 128;
  static constexpr int kFrontBytes = 1024, kQuerySums = 512, kMergedBytes = kPrefillRows * kDim * 4;  // sums: bytes into the front
  static constexpr int kSharedBytes = kFrontBytes + kQueryBytes + 2 * kStages * kLaneBytes + kMergedBytes;
};

struct LaneMaps {
  CUtensorMap keys, values;  // [batch, kv_heads, slots, dim]
};

// Two rings of chunks, of keys and of values.
template <class Shape>
struct LaneRing {
  uint32_t address;  // of the front of shared memory; barriers lie there

  __device__ __forceinline__ uint32_t full(bool values, int stage) const { return address + (values * kStages + stage) * 8; }
  __device__ __forceinline__ uint32_t empty(bool values, int stage) const { return full(values, stage) + 2 * kStages * 8; }
  __device__ __forceinline__ uint32_t queries() const { return address + Shape::kFrontBytes; }
  __device__ __forceinline__ uint32_t lane(bool values, int stage) const {
    return queries() + Shape::kQueryBytes + (values * kStages + stage) * Shape::kLaneBytes;
  }
};

struct Slot {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <class Shape>
__device__ __forceinline__ void load_lane(const LaneRing<Shape>& ring, const CUtensorMap* map, bool values, const Slot& slot,
                                          bool waits, const Tile& tile, int chunk) {
  if (waits) barrier_wait(ring.empty(values, slot.stage), slot.parity ^ 1);
  const uint32_t full = ring.full(values, slot.stage);
  barrier_arrive_expect(full, Shape::kLaneBytes);
#pragma unroll
  for (int box = 0; box < Shape::kBoxes; ++box)
    copy_box_4d(ring.lane(values, slot.stage) + box * Shape::kBoxBytes, map, box * 64, chunk * kChunk, tile.kv_head,
                tile.batch_row, full);
}

template <class Shape>
__device__ __forceinline__ void produce(const LaneMaps& maps, const LaneRing<Shape>& ring, const Tile& tile, Walk walk) {
  Slot slot;
#pragma unroll 1
  for (int i = 0; !walk.done(); walk.next(), slot.next(), ++i) {
    load_lane<Shape>(ring, &maps.keys, false, slot, i >= kStages, tile, walk.chunk);
    load_lane<Shape>(ring, &maps.values, true, slot, i >= kStages, tile, walk.chunk);
  }
}

// One group of four warps.
template <class Shape>
struct Group {
  const AttentionArgs& a;
  const LaneRing<Shape>& ring;
  const Tile& tile;
  int number, lane;
  float query_sum[2] = {0.f, 0.f};  // of int4 codes
  int limit[2], open_until, open_from;  // chunks that end below and begin at these slots are seen by every row of the group

  __device__ __forceinline__ Group(const AttentionArgs& args, const LaneRing<Shape>& lanes, const Tile& of)
      : a(args), ring(lanes), tile(of), number(threadIdx.x / 128), lane(threadIdx.x % kWarp) {
    const int first = tile.first_row + number * 64, row = first + threadIdx.x % 128 / kWarp * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = (row + r * 8) / a.group;
      limit[r] = token < tile.end_token ? tile.start + token : -1;
    }
    const int last_token = min((first + 63) / a.group, tile.end_token - 1);
    open_until = min(tile.start + first / a.group + 1, tile.end_slot());
    open_from = a.rule.recent == 0 ? 0 : tile.start + last_token - a.rule.recent + 1;
  }
  __device__ __forceinline__ void release(bool values, int stage) const {
    if (lane == 0) barrier_arrive(ring.empty(values, stage));
  }
  __device__ __forceinline__ void multiply_keys(float (&scores)[8][4], const Slot& slot) const {
    barrier_wait(ring.full(false, slot.stage), slot.parity);
    const uint32_t queries = swizzled_tile_address(ring.queries() + number * 64 * 128);
    const uint32_t keys = swizzled_tile_address(ring.lane(false, slot.stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Shape::kDim / 16; ++k)
      wgmma(scores, swizzled_tile_descriptor(queries + k / 4 * (kPrefillRows * 128 / 16) + k % 4 * 2),
            swizzled_tile_descriptor(keys + k / 4 * (Shape::kBoxBytes / 16) + k % 4 * 2), k > 0);
    wgmma_commit();
  }
  // The groups issue their products in turns: one computes weights while the tensor cores work for the other.
  __device__ __forceinline__ void take_over() const { asm volatile("bar.sync %0, 256;" ::"r"(number + 3) : "memory"); }
  __device__ __forceinline__ void hand_over() const { asm volatile("bar.arrive %0, 256;" ::"r"(4 - number) : "memory"); }
  // Slots behind the row's end hold anything: weights of 0 do not make them 0.
  __device__ __forceinline__ void clear_behind(int stage, int first_slot) const {
    const int first = tile.end_slot() - first_slot;
    if (first >= kChunk) return;
    for (int i = threadIdx.x % 128; i < (kChunk - first) * 8; i += 128)
#pragma unroll
      for (int box = 0; box < Shape::kBoxes; ++box)
        store_zeros(ring.lane(true, stage) + box * Shape::kBoxBytes + (first + i / 8) * 128 + i % 8 * 16);
    fence_async_reads();
    sync_group(number);
  }
  __device__ __forceinline__ void multiply_values(GroupState<Shape>& state, const uint32_t (&weights)[16], const Slot& slot,
                                                  int first_slot, bool begins) const {
    barrier_wait(ring.full(true, slot.stage), slot.parity);
    clear_behind(slot.stage, first_slot);
    const uint32_t values = ring.lane(true, slot.stage);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      wgmma_rows(state.out, weights + 4 * k, swizzled_rows_descriptor(values + k * 16 * 128, Shape::kBoxBytes),
                 k > 0 || !begins);
    wgmma_commit();
  }
  __device__ __forceinline__ void weigh_chunk(int chunk, float (&scores)[8][4], GroupState<Shape>& state,
                                              float (&factor)[2]) const {
    const int first = chunk * kChunk;
    if constexpr (Shape::kBits) scale_products<Shape>(scales_from(a.scales.keys, a.scales.key_zeros, first), query_sum, scores);
    if (a.rule.shaped) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[j][e] = a.rule.shape(scores[j][e]);
    }
    if (first + kChunk > open_until || first < open_from) hide(first + lane % 4 * 2, limit, a.rule.window_at(first), scores);
    weigh<Shape>(a.rule.slope, scores, state, factor);
  }
  // Of this thread's first slot of a chunk.
  __device__ __forceinline__ ChunkScales scales_from(const float* steps, const float* zeros, int first_slot) const {
    const int64_t slots = (a.cache.slots + kChunk - 1) / kChunk * kChunk;
    const int64_t at = (tile.batch_row * a.cache.kv_heads + tile.kv_head) * slots + first_slot + lane % 4 * 2;
    return {steps + at, zeros + at};
  }
  __device__ __forceinline__ void narrow(int chunk, const float (&scores)[8][4], const float (&factor)[2], GroupState<Shape>& state,
                                         uint32_t (&weights)[16]) const {
    if constexpr (Shape::kBits)
      narrow_scaled_weights(scales_from(a.scales.values, a.scales.value_zeros, chunk * kChunk), scores, factor, state, weights);
    else
      narrow_weights(scores, weights);
  }
  __device__ __forceinline__ void write(const Merged<Shape>& merged) const {
    const int row = number * 64 + threadIdx.x % 128 / kWarp * 16 + lane / 4;
    const float low = share_of(a, tile, row, merged.largest[0], limit[0] < 0 ? 0.f : merged.sum[0]);
    const float high = share_of(a, tile, row + 8, merged.largest[1], limit[1] < 0 ? 0.f : merged.sum[1]);
#pragma unroll
    for (int n = 0; n < Shape::kOutTiles; ++n) {
      const float4 v = merged.out[n * 128];
      write_pair(a, tile, row, n * 8 + lane % 4 * 2, finished(v.x, low), finished(v.y, low));
      write_pair(a, tile, row + 8, n * 8 + lane % 4 * 2, finished(v.z, high), finished(v.w, high));
    }
  }
  __device__ __forceinline__ void run(Walk walk, float4* room) const {
    GroupState<Shape> state;
    Merged<Shape> merged;
    merged.out = room + number * Shape::kOutTiles * 128 + threadIdx.x % 128;
    Team<Shape> team;
    merged.clear();
    team.clear();
    state.clear_numbers();
    float scores[8][4], factor[2];
    uint32_t weights[16];
    Slot slot;
    multiply_keys(scores, slot);
    wgmma_wait<0>();
    release(false, 0);
    weigh_chunk(walk.chunk, scores, state, factor);
    narrow(walk.chunk, scores, factor, state, weights);
    bool begins = true;  // whether the chunk is the first of its rank
    if (number == 1) hand_over();
#pragma unroll 1
    while (!walk.done()) {
      const int chunk = walk.chunk, rank = walk.rank, of = walk.team();
      walk.next();
      const Slot current = slot;
      slot.next();
      if (walk.done()) {
        take_over();
        multiply_values(state, weights, current, chunk * kChunk, begins);
        hand_over();
        wgmma_wait<0>();
        const float sum[2] = {state.whole_sum(0), state.whole_sum(1)}, shift[2] = {state.whole_shift(0), state.whole_shift(1)};
        state.add(shift);
        end_rank<Shape>(state.out, state.largest, sum, true, team, merged);
        break;
      }
      take_over();
      multiply_keys(scores, slot);
      multiply_values(state, weights, current, chunk * kChunk, begins);
      hand_over();
      wgmma_wait<1>();
      release(false, slot.stage);
      const bool ends = walk.rank != rank;
      float largest[2], sum[2], shift[2];
      if (ends) {
        largest[0] = state.largest[0], largest[1] = state.largest[1];
        sum[0] = state.whole_sum(0), sum[1] = state.whole_sum(1);
        shift[0] = state.whole_shift(0), shift[1] = state.whole_shift(1);
        state.clear_numbers();
      }
      weigh_chunk(walk.chunk, scores, state, factor);
      wgmma_wait<0>();
      release(true, current.stage);
      if (ends) {
        state.add(shift);
        end_rank<Shape>(state.out, largest, sum, walk.team() != of, team, merged);
      } else if (__any_sync(0xFFFFFFFFu, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
        for (int n = 0; n < Shape::kOutTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) state.out[n][e] = __fmul_rn(state.out[n][e], factor[e / 2]);
      }
      narrow(walk.chunk, scores, factor, state, weights);
      begins = ends;
    }
    write(merged);
  }
};

template <class Shape>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    attention_prefill_kernel(const __grid_constant__ LaneMaps maps, const AttentionArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const LaneRing<Shape> ring{unknown_to_compiler(shared_address(memory))};
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * kStages; ++i) {
      barrier_init(ring.address + i * 8, 1);
      barrier_init(ring.address + (2 * kStages + i) * 8, 4 * kGroups);
    }
    barrier_init_done();
  }
  __syncthreads();
  wait_for_previous_kernel();
  const Tile tile(a, kPrefillRows);
  const Walk walk(Seen(a.rule, tile), 0, kRanks);
  if (threadIdx.x >= 128 * kGroups) {
    release_registers<24>();
    if (!tile.is_padding() && threadIdx.x / kWarp == 4 * kGroups && elect_lane()) produce<Shape>(maps, ring, tile, walk);
    return;
  }
  take_registers<240>();
  if (tile.is_padding()) {
    for (int i = threadIdx.x * 2; i < kPrefillRows * Shape::kDim; i += 256 * kGroups)
      write_pair(a, tile, i / Shape::kDim, i % Shape::kDim, 0.f, 0.f);
    return;
  }
  Group<Shape> group(a, ring, tile);
  float* const sums = reinterpret_cast<float*>(memory + Shape::kQuerySums);
  if constexpr (Shape::kBits)
    load_ordered_group_queries<Shape>(a, tile, ring.queries(), sums, group.number);
  else
    load_group_queries<Shape>(a, tile, ring.queries(), group.number);
  fence_async_reads();
  sync_group(group.number);
  if constexpr (Shape::kBits == 4)
#pragma unroll
    for (int r = 0; r < 2; ++r) group.query_sum[r] = sums[threadIdx.x / kWarp * 16 + group.lane / 4 + r * 8];
  group.run(walk, reinterpret_cast<float4*>(memory + Shape::kSharedBytes - Shape::kMergedBytes));
}

const char* describe_lanes(CUtensorMap* map, const void* lanes, const mlspec_cuda_cache& cache, int64_t batch_stride,
                           int64_t head_stride) {
  const auto encode = tensor_map_encoder();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled: CUDA 12.0 or later is needed";
  const cuuint64_t sizes[4] = {cuuint64_t(cache.dim), cuuint64_t(cache.slots), cuuint64_t(cache.kv_heads), cuuint64_t(cache.batch)};
  const cuuint64_t strides[3] = {cuuint64_t(cache.dim * 2), cuuint64_t(head_stride * 2), cuuint64_t(batch_stride * 2)};
  const cuuint32_t box[4] = {64, kChunk, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(lanes), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the cache cannot be described to the copy engine: align its rows to 16 bytes";
}

template <class Shape>
const char* launch(AttentionArgs args, const mlspec_cuda_row_launch& how) {
  const mlspec_cuda_cache& cache = args.cache;
  LaneMaps maps = {};
  if (const char* problem = describe_lanes(&maps.keys, cache.keys, cache, cache.key_batch_stride, cache.key_head_stride))
    return problem;
  if (const char* problem = describe_lanes(&maps.values, cache.values, cache, cache.value_batch_stride, cache.value_head_stride))
    return problem;
  args.tiles = int((args.tokens.width * args.group + kPrefillRows - 1) / kPrefillRows), args.teams = 1;
  const RowGrid grid{dim3(unsigned(args.tiles), unsigned(cache.kv_heads), unsigned(cache.batch)), kPrefillThreads,
                     unsigned(Shape::kSharedBytes)};
  return launch_rows(how, grid, attention_prefill_kernel<Shape>, maps, args);
}

template <int kBits>
const char* launch_bits(const AttentionArgs& args, const mlspec_cuda_row_launch& how) {
  return args.cache.dim <= 64 ? launch<PrefillShape<64, kBits>>(args, how) : launch<PrefillShape<128, kBits>>(args, how);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

int32_t mlspec_cuda_attention_prefill_serves(const mlspec_cuda_attention* attention, const mlspec_cuda_tokens* tokens,
                                             const mlspec_cuda_cache* cache) {
  const int64_t rows = tokens->width * (attention->heads / cache->kv_heads), tiles = (rows + kPrefillRows - 1) / kPrefillRows;
  if (cache->dim > 128 || tiles * cache->kv_heads * cache->batch < attention->multiprocessors / 4) return 0;
  return rows >= (cache->code_bits ? kCodedRows : kPrefillRows);
}

const char* mlspec_cuda_ragged_attention_prefill(const mlspec_cuda_attention* attention, const mlspec_cuda_tokens* tokens,
                                                 const mlspec_cuda_cache* cache, const mlspec_cuda_row_launch* how) {
  AttentionArgs args;
  if (const char* problem = read_arguments(&args, *attention, *tokens, *cache)) return problem;
  if (cache->dim > 128) return "head_dim must be at most 128";
  if (cache->code_bits) return "codes must be widened first";
  if (args.scales.key_zeros) return launch_bits<4>(args, *how);
  return args.scales.keys ? launch_bits<8>(args, *how) : launch_bits<0>(args, *how);
}
