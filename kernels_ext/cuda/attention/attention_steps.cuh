// How does a block attend over bfloat16 (attention.cu) or codes (attention_codes*.cu), and how many are launched?
//
// The order of a row's sums is that of attention_walk.cuh, so a token's bits depend on its position alone: not on width, batch,
// neighbours or the slots allocated. Groups of four warps take ranks or whole teams side by side and merge through shared memory.
// Where tiles are few, the eight blocks of a cluster take a team each and merge through each other's shared memory; where they
// fill the chip (and on chips without clusters) one block takes all teams.
#pragma once

#include <type_traits>

#include "attention_codes.cuh"
#include "attention_merge.cuh"

namespace mlspec {

template <class Shape>
struct Lanes {
  static constexpr int kElementBytes = Shape::kBits ? 1 : 2;
  const char *keys, *values;
  int dim, pitch, end;  // pitch: bytes of a slot; slots from `end` on are not read

  __device__ Lanes(const AttentionArgs& a, const Tile& tile)
      : keys(static_cast<const char*>(a.cache.keys) +
             (tile.batch_row * a.cache.key_batch_stride + tile.kv_head * a.cache.key_head_stride) * kElementBytes),
        values(static_cast<const char*>(a.cache.values) +
               (tile.batch_row * a.cache.value_batch_stride + tile.kv_head * a.cache.value_head_stride) * kElementBytes),
        dim(Shape::dim_of(a.cache.dim)),
        pitch(Shape::kBits ? pitch_of<Shape::kBits>(dim) : dim * 2),
        end(tile.end_slot()) {}
};

// 64 slots of keys or values, zeros behind the end and behind the head's elements.
template <class Shape>
__device__ __forceinline__ void load_slots(uint32_t to, const char* lane, int first_slot, int dim, int end) {
  const auto* const from = reinterpret_cast<const __nv_bfloat16*>(lane);
  constexpr int kVectors = Shape::kDim / kVector;
#pragma unroll 8
  for (int i = threadIdx.x % kAttendThreads; i < kChunk * kVectors; i += kAttendThreads) {
    const int slot = i / kVectors, element = i % kVectors * kVector;
    const bool inside = first_slot + slot < end && element < dim;
    copy_async(to + uint32_t(slot * Shape::kStride + element) * 2,
               inside ? from + int64_t(first_slot + slot) * dim + element : from, inside);
  }
}

template <class Shape>
__device__ __forceinline__ void load_queries(const AttentionArgs& a, const Tile& tile, uint32_t to) {
  constexpr int kVectors = Shape::kDim / kVector;
  const int dim = int(a.cache.dim);
  for (int i = threadIdx.x; i < Shape::kRows * kVectors; i += blockDim.x) {
    const int row = i / kVectors, element = i % kVectors * kVector;
    const __nv_bfloat16* const query = query_of(a, tile, row);
    const bool inside = query && element < dim;
    copy_async(to + uint32_t(row * Shape::kStride + element) * 2, inside ? query + element : a.q, inside);
  }
}

// The ranks that a group of warps takes in each of its rounds. kSpread: a team's ranks are spread over the groups, one at a time;
// else each takes whole teams.
template <int kGroups, bool kSpread>
struct Share {
  static constexpr int kCount = kSpread ? 1 : kTeamRanks;
  int first, rounds;

  __device__ __forceinline__ Share(const AttentionArgs& a, const Tile& tile, int group)
      : first(tile.team * kTeamRanks + group * kCount),
        rounds(kSpread ? kTeamRanks / kGroups : a.teams == kTeams ? 1 : kTeams / kGroups) {}
  __device__ __forceinline__ Walk walk(const Seen& seen, int round) const {
    const int rank = first + round * kGroups * kCount;
    return Walk(seen, rank, rank + kCount);
  }
};

// What was written by kernels long done comes near while the kernel in front still runs. The lengths may be old then: they only
// say which lines of the cache are likely to be read.
template <class Shape, class ShareOf>
__device__ __forceinline__ void prefetch(const AttentionArgs& a) {
  const Tile guess(a, Shape::kRows);
  if (guess.is_padding()) return;
  const Lanes<Shape> lanes(a, guess);
  const ShareOf share(a, guess, threadIdx.x / kAttendThreads);
  const Walk walk = share.walk(Seen(a.rule, guess), 0);
  if (walk.done()) return;
  const int bytes = min(kChunk, lanes.end - walk.chunk * kChunk) * lanes.pitch;
  const int64_t from = int64_t(walk.chunk) * kChunk * lanes.pitch;
  for (int at = threadIdx.x % kAttendThreads * 128; at < bytes; at += kAttendThreads * 128) {
    prefetch_line(lanes.keys + from + at);
    prefetch_line(lanes.values + from + at);
  }
}

template <class Shape>
__device__ __forceinline__ void write_padding(const AttentionArgs& a, const Tile& tile) {
  for (int i = threadIdx.x * 2; i < Shape::kRows * Shape::kDim; i += blockDim.x * 2)
    if (i / 2 / blockDim.x % a.teams == tile.team) write_pair(a, tile, i / Shape::kDim, i % Shape::kDim, 0.f, 0.f);
}

// The last position each of this thread's rows may see; -1 for padding.
template <class Shape>
__device__ __forceinline__ void find_limits(const AttentionArgs& a, const Tile& tile, int (&limit)[Shape::kTiles][2]) {
#pragma unroll
  for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
    for (int r = 0; r < Shape::kHalves; ++r) {
      const int token = (tile.first_row + i * 16 + r * 8 + int(threadIdx.x) % kWarp / 4) / a.group;
      limit[i][r] = token < tile.end_token ? tile.start + token : -1;
    }
}

struct QueriesAsTheyAre {
  __device__ __forceinline__ void load(const char*) {}
};

// The chunks of a walk, one after another; as many as there are stages are on their way. Of codes there are two.
template <class Shape>
struct Chunks {
  using Queries = std::conditional_t<Shape::kBits != 0, OrderedQueries<Shape>, QueriesAsTheyAre>;
  const AttentionArgs& a;
  const AttentionGroup<Shape>& group;
  const Lanes<Shape>& lanes;
  uint32_t first_stage;  // shared memory address
  Walk walk, ahead;
  int stage = 0;

  __device__ __forceinline__ uint32_t lane(bool values, int of) const {
    return first_stage + of * Shape::kStageBytes + values * Shape::kLaneBytes;
  }
  __device__ __forceinline__ void load(bool values, int of) const {
    const char* const from = values ? lanes.values : lanes.keys;
    if (!ahead.done()) {
      if constexpr (Shape::kBits)
        load_codes<Shape::kLaneBytes>(lane(values, of), from, ahead.chunk * kChunk, lanes.pitch, lanes.end);
      else
        load_slots<Shape>(lane(values, of), from, ahead.chunk * kChunk, lanes.dim, lanes.end);
    }
    commit_copies();  // also where there is nothing, so that waiting is counting
  }
  __device__ __forceinline__ void begin() {
    if constexpr (Shape::kBits) {
      load(false, 0), load(true, 0);
      ahead.next_if();
      load(false, 1);  // its values come when those before them are the only ones
    } else {
      for (int s = 0; s < a.stages; ++s, ahead.next_if()) load(false, s), load(true, s);
    }
  }
  __device__ __forceinline__ void wait() const {
    a.stages == 1 ? wait_for_copies<1>() : wait_for_copies<3>();
    sync_group(group.number);
  }
  // One chunk, added to what was found of its rank.
  __device__ __forceinline__ void step(const Queries& queries, const int (&limit)[Shape::kTiles][2], Attended<Shape>& own) {
    if constexpr (Shape::kBits)
      step_over_codes(queries, limit, own);
    else
      step_over_elements(limit, own);
    if (++stage == a.stages) stage = 0;
  }
  __device__ __forceinline__ void step_over_codes(const Queries& queries, const int (&limit)[Shape::kTiles][2], Attended<Shape>& own) {
    float scores[Shape::kTiles][2][4], factor[Shape::kTiles][2];
    const uint32_t keys = lane(false, stage), values = lane(true, stage);
    wait_for_copies<2>();
    sync_group(group.number);  // keys are here, the values of the chunk before were read
    load(true, stage ^ 1);
    ahead.next_if();
    multiply_coded_keys(queries, keys, lanes.dim, scores);
    SlotScales<Shape>(keys, lanes.dim).multiply(scores, queries.sums);
    group.score(a.rule, walk.chunk * kChunk, limit, scores);
    wait_for_copies<2>();
    sync_group(group.number);  // maxima and values are here, the keys were read
    load(false, stage);
    ValueCodes<Shape> codes;
    if constexpr (Shape::kTiles == 1) codes.load(values, lanes.dim);  // more tiles leave no registers for them
    group.weigh(a.rule, scores, own, factor, SlotScales<Shape>(values, lanes.dim));
    sync_group(group.number);  // weights are here
    if constexpr (Shape::kTiles > 1) codes.load(values, lanes.dim);
    codes.multiply(group.weights, factor, own);
    walk.next();
  }
  __device__ __forceinline__ void step_over_elements(const int (&limit)[Shape::kTiles][2], Attended<Shape>& own) {
    float scores[Shape::kTiles][2][4], factor[Shape::kTiles][2];
    wait();  // keys are here
    group.multiply_keys(lane(false, stage), scores);
    group.score(a.rule, walk.chunk * kChunk, limit, scores);
    sync_group(group.number);  // maxima are here, the keys were read
    load(false, stage);
    group.weigh(a.rule, scores, own, factor, AsTheyAre());
    wait();  // weights and values are here
    group.multiply_values(lane(true, stage), factor, own);
    walk.next();
    sync_group(group.number);  // the values were read
    load(true, stage);
    ahead.next_if();
  }
};

// All chunks of a walk: of one rank, or of a team's ranks one after another.
template <class Shape, bool kSpread>
__device__ __forceinline__ void attend(Chunks<Shape>& chunks, const typename Chunks<Shape>::Queries& queries,
                                       const int (&limit)[Shape::kTiles][2], Attended<Shape>& found) {
  found.clear();
  if constexpr (kSpread) {
    while (!chunks.walk.done()) chunks.step(queries, limit, found);
    chunks.group.complete_sums(found);
  } else {
    while (!chunks.walk.done()) {
      Attended<Shape> own;
      own.clear();
      const int rank = chunks.walk.rank;
      while (!chunks.walk.done() && chunks.walk.rank == rank) chunks.step(queries, limit, own);
      chunks.group.complete_sums(own);
      merge(found, own);
    }
  }
}

// Single groups over codes are many on a multiprocessor.
template <class Shape, int kGroups>
constexpr int kLeastBlocks = Shape::kBits && kGroups == 1 && Shape::kTiles == 1 && Shape::kDim <= 128 ? 4 : 1;

template <class Shape, int kGroups, bool kSpread>
__global__ void __launch_bounds__(kGroups* kAttendThreads, (kLeastBlocks<Shape, kGroups>)) attention_kernel(const AttentionArgs a) {
  extern __shared__ uint4 memory[];
  const int number = threadIdx.x / kAttendThreads, group_bytes = Shape::group_bytes(a.stages);
  char* const shared = reinterpret_cast<char*>(memory);
  char* const front = shared + Shape::kQueryBytes + number * group_bytes;
  float* const maxima = reinterpret_cast<float*>(front + Shape::kWeightBytes);
  const AttentionGroup<Shape> group{shared_address(shared), shared_address(front), maxima, maxima + kAttendWarps * Shape::kRows,
                                    number};
  const auto found_at = [&](char* of) {
    return Found<Shape>{reinterpret_cast<float*>(of + Shape::kFrontBytes),
                        reinterpret_cast<float4*>(of + Shape::kFrontBytes - Shape::kStatBytes)};
  };
  launch_dependents();
  prefetch<Shape, Share<kGroups, kSpread>>(a);
  wait_for_previous_kernel();
  const Tile tile(a, Shape::kRows);
  if (tile.is_padding()) return write_padding<Shape>(a, tile);  // every block of the cluster
  const Lanes<Shape> lanes(a, tile);
  const Seen seen(a.rule, tile);
  const Share<kGroups, kSpread> share(a, tile, number);
  const Found<Shape> first = found_at(shared + Shape::kQueryBytes);
  int limit[Shape::kTiles][2];
  find_limits<Shape>(a, tile, limit);
  if constexpr (Shape::kBits)
    load_ordered_queries<Shape>(a, tile, shared);
  else
    load_queries<Shape>(a, tile, group.queries);
  typename Chunks<Shape>::Queries queries;
  Shared<Shape, kGroups> merged;
#pragma unroll 1
  for (int round = 0; round < share.rounds; ++round) {
    const Walk walk = share.walk(seen, round);
    Chunks<Shape> chunks{a, group, lanes, shared_address(front + Shape::kFrontBytes + Shape::kApartBytes), walk, walk};
    chunks.begin();
    if (round == 0) {
      a.stages == 1 ? wait_for_copies<1>() : wait_for_copies<3>();
      __syncthreads();  // all queries are here
      queries.load(shared);
    }
    Attended<Shape> found;
    attend<Shape, kSpread>(chunks, queries, limit, found);
    wait_for_copies<0>();
    sync_group(number);  // the lanes were read
    found_at(front).write(found);
    if (kGroups == 1 && a.teams == kTeams) return merge_cluster(a, tile, first);
    __syncthreads();  // what the groups have found is here
    merged.add(first, group_bytes);
    __syncthreads();  // and was read
  }
  if (a.teams == kTeams) {
    merged.put(first);
    merge_cluster(a, tile, first);
  } else {
    merged.for_each([&](int index, const Four& four) { write_four<Shape>(a, tile, index, four); });
  }
}

template <class Shape, int kGroups, bool kSpread>
const char* launch_groups(AttentionArgs args, const mlspec_cuda_attention& attention, const mlspec_cuda_row_launch& how) {
  const int64_t chunks = most_chunks(args);
  args.stages = chunks <= args.teams || Shape::shared_bytes(kGroups, 2) > attention.shared_bytes ? Shape::kLeastStages : 2;
  if (Shape::shared_bytes(kGroups, args.stages) > attention.shared_bytes) return "a block needs more shared memory than this GPU has";
  const RowGrid grid{dim3(unsigned(args.tiles * args.teams), unsigned(args.cache.kv_heads), unsigned(args.cache.batch)),
                     kGroups * kAttendThreads, unsigned(Shape::shared_bytes(kGroups, args.stages)), unsigned(args.teams)};
  return launch_rows(how, grid, attention_kernel<Shape, kGroups, kSpread>, args);
}

// Several groups in a block where it takes all teams, and where rows are long: each has its own chunk on its way. One block takes all
// teams where tiles keep the chip busy: a bfloat16 tile a multiprocessor's share of the memory, codes, which also take time to
// widen, every multiprocessor.
template <class Shape>
const char* launch_attention(AttentionArgs args, int64_t rows, const mlspec_cuda_attention& attention,
                             const mlspec_cuda_row_launch& how) {
  constexpr int kOfTeams = Shape::kDim > 128 || Shape::kTiles > 2 ? 2 : 4, kOfRanks = Shape::kDim > 128 || Shape::kTiles > 3 ? 2 : 4;
  args.tiles = int((rows + Shape::kRows - 1) / Shape::kRows);
  const int64_t units = args.tiles * args.cache.batch * args.cache.kv_heads, chunks = most_chunks(args);
  const int64_t places = attention.multiprocessors;
  const int64_t busy = Shape::kBits ? places : places * 9 / 20;
  args.teams = !how.clusters ? 1 : attention.teams ? attention.teams : units < busy ? kTeams : 1;
  // So many single groups over codes are as busy as groups of one block, and begin and end once.
  const bool single = kLeastBlocks<Shape, 1> > 1 && units * kTeams > 3 * places;
  bool several = args.teams == 1 ? units <= places || chunks > kTeams : !single && chunks > (units * kTeams <= places ? 1 : 16) * kTeams;
  if (attention.groups) several = attention.groups > 1;
  const auto fits = [&](int groups) { return Shape::shared_bytes(groups, Shape::kLeastStages) <= attention.shared_bytes; };
  if (several && args.teams == kTeams && fits(kOfRanks)) return launch_groups<Shape, kOfRanks, true>(args, attention, how);
  if (several && args.teams == 1 && fits(kOfTeams)) return launch_groups<Shape, kOfTeams, false>(args, attention, how);
  return launch_groups<Shape, 1, false>(args, attention, how);
}

// As few tiles as there can be, each reads the row's keys and values; of short rows more of them, which work side by side.
template <int kDim, int kBits>
const char* launch_tiles(const AttentionArgs& args, const mlspec_cuda_attention& attention, const mlspec_cuda_row_launch& how) {
  const int64_t rows = args.tokens.width * args.group;
  if constexpr (kBits != 0)
    if (rows <= 8 && args.cache.dim == kDim) return launch_attention<AttentionShape<kDim, 1, kBits, true>>(args, rows, attention, how);
  if (rows <= 16) return launch_attention<AttentionShape<kDim, 1, kBits>>(args, rows, attention, how);
  const bool side_by_side = args.cache.slots <= 16 * kChunk && 2 * args.cache.batch * args.cache.kv_heads < attention.multiprocessors / 2;
  if constexpr (kDim <= 128) {
    if (rows > 48 && !side_by_side) return launch_attention<AttentionShape<kDim, 4, kBits>>(args, rows, attention, how);
    if (rows > 32 && !side_by_side) return launch_attention<AttentionShape<kDim, 3, kBits>>(args, rows, attention, how);
  }
  return launch_attention<AttentionShape<kDim, 2, kBits>>(args, rows, attention, how);
}

template <int kBits>
const char* launch_steps(const AttentionArgs& args, const mlspec_cuda_attention& attention, const mlspec_cuda_row_launch& how) {
  if (args.cache.dim <= 64) return launch_tiles<64, kBits>(args, attention, how);
  return args.cache.dim <= 128 ? launch_tiles<128, kBits>(args, attention, how) : launch_tiles<256, kBits>(args, attention, how);
}

extern template const char* launch_steps<8>(const AttentionArgs&, const mlspec_cuda_attention&, const mlspec_cuda_row_launch&);
extern template const char* launch_steps<4>(const AttentionArgs&, const mlspec_cuda_attention&, const mlspec_cuda_row_launch&);

}  // namespace mlspec
