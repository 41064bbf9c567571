// How does a block multiply the weights of 64 or 128 outputs with up to 288 tokens, the same bits for any number?
//
// Inputs are cut into chunks of 128 (packed weights) or 64 (bfloat16). The chunks of a tile of 64 outputs are dealt to the
// blocks of one cluster (their number depends on the weight's shape alone), 128 inputs at least; each block's chunks
// alternately to the groups of four warps that share a tile (bfloat16 and what equals it one, else two). A group sums its chunks
// in ascending order; the sums are added group 0 + group 1 in each block, then over blocks by rank. A token is a column of operand
// B: neither the number of columns nor their place changes what the tensor cores add, nor in what order, and mma and wgmma add
// alike (checked bit for bit by eval/bench_gpu_linear).
#pragma once

#include "linear_ring.cuh"
#include "linear_scaled.cuh"
#include "linear_sums.cuh"

namespace mlspec {

// Operand B of one step (32 bytes of k) for all tokens of a stage, for mma; two steps where a block has 8 tokens.
template <int kTokenTiles>
struct TokenFragments {
  static constexpr int kSteps = kTokenTiles == 1 ? 2 : 1;
  uint32_t b[kSteps][kTokenTiles][2];

  // Where a lane reads step 0: row and 16 bytes of it, swizzled; a step further is 32 bytes exclusive-or'ed.
  __device__ __forceinline__ static uint32_t place(int lane) {
    const int row = kTokenTiles == 1 ? lane & 7 : (lane >> 4) * 8 + (lane & 7);
    const int piece = kTokenTiles == 1 ? lane >> 3 : lane >> 3 & 1;
    return row * 128 + ((piece ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ void load(uint32_t tokens, uint32_t place, int step) {
    const uint32_t address = tokens + (place ^ (step % 4 * 32)) + step / 4 * (kTokenTiles * 8 * 128);
    uint32_t v[4];
    if constexpr (kTokenTiles == 1) {
      load_matrices(v, address);
      b[0][0][0] = v[0], b[0][0][1] = v[1], b[1][0][0] = v[2], b[1][0][1] = v[3];
    } else {
#pragma unroll
      for (int t = 0; t < kTokenTiles; t += 2) {
        load_matrices(v, address + t * 1024);
        b[0][t][0] = v[0], b[0][t][1] = v[1], b[0][t + 1][0] = v[2], b[0][t + 1][1] = v[3];
      }
    }
  }
};

// Steps of a chunk, and those whose dots share a scale.
template <class Format>
struct Steps {
  static constexpr int kAll = Format::kActivationBits == 8 ? 4 : 8;
  static constexpr bool kScaled = Format::kGroups > 0, kTokenSums = Format::kActivationBits == 8 && Format::kHasZeros;
  static constexpr int kGroups = kScaled ? Format::kGroups : 1, kOfGroup = kAll / kGroups;
};

// One chunk by mma: every warp on its own.
template <class V>
__device__ __forceinline__ void multiply_mma(float (&sums)[V::kTokenTiles][4], const typename V::Format& format,
                                             uint32_t tokens, uint32_t place, const float* x_scales, int lane) {
  using S = Steps<typename V::Format>;
  TokenFragments<V::kTokenTiles> fragments;
  const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    typename V::Dot dots[V::kTokenTiles][4] = {};
    int token_sums[V::kTokenTiles][4] = {};
#pragma unroll
    for (int step = g * S::kOfGroup; step < (g + 1) * S::kOfGroup; ++step) {
      constexpr int kLoaded = TokenFragments<V::kTokenTiles>::kSteps;
      if (step % kLoaded == 0) fragments.load(tokens, place, step);
      const auto& b = fragments.b[step % kLoaded];
      uint32_t a[4];
      format.fragment(a, step);
#pragma unroll
      for (int t = 0; t < V::kTokenTiles; ++t) {
        if constexpr (S::kScaled) mma(dots[t], a, b[t][0], b[t][1]);
        else mma(sums[t], a, b[t][0], b[t][1]);
        if constexpr (S::kTokenSums) mma(token_sums[t], ones, b[t][0], b[t][1]);
      }
    }
    if constexpr (S::kScaled) add_scaled<V>(sums, dots, format, x_scales, token_sums, g, lane);
  }
}

// One chunk by wgmma: four warps together, the same sums in the same order.
template <class V>
__device__ __forceinline__ void multiply_wgmma(float (&sums)[V::kTokenTiles][4], const typename V::Format& format,
                                               uint32_t tokens, const float* x_scales, int lane) {
  using S = Steps<typename V::Format>;
  constexpr int kBoxStep = V::kBoxTokens * 128 / 16, kTilesOfPart = V::kTokenTiles / V::kParts;
  using Part = float[kTilesOfPart][4];
  const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
  const uint32_t descriptor = swizzled_tile_address(tokens);
  // With 128 tokens and more the sums leave registers for half of the steps only.
  constexpr int kBatch = V::kTokenTiles >= 16 ? S::kAll / 2 : S::kAll;
  static_assert((kBatch == S::kAll && V::kParts == 1) || !S::kScaled, "scaled groups are not cut");
  uint32_t a[kBatch][4];
#pragma unroll
  for (int first = 0; first < S::kAll; first += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) format.fragment(a[i], first + i);
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      typename V::Dot dots[V::kTokenTiles][4];
      int token_sums[V::kTokenTiles][4];
      wgmma_fence();
#pragma unroll
      for (int i = g * S::kOfGroup; i < min((g + 1) * S::kOfGroup, kBatch); ++i) {
        const uint64_t b = swizzled_tile_descriptor(descriptor + (first + i) / 4 * kBoxStep + (first + i) % 4 * 2);
        if constexpr (S::kScaled) {
          wgmma(dots, a[i], b, i > g * S::kOfGroup);
        } else {
#pragma unroll
          for (int part = 0; part < V::kParts; ++part)
            wgmma(*reinterpret_cast<Part*>(sums[part * kTilesOfPart]), a[i], b + part * V::kBoxes * kBoxStep, true);
        }
        if constexpr (S::kTokenSums) wgmma(token_sums, ones, b, i > g * S::kOfGroup);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if constexpr (S::kScaled) add_scaled<V>(sums, dots, format, x_scales, token_sums, g, lane);
    }
  }
}

// Where a group of warps is in the ring.
struct Turn {
  int slot, parity;
};

// Packed weights, through registers.
template <class V>
__device__ __forceinline__ void consume_codes(float (&sums)[V::kTokenTiles][4], Turn& turn, const LinearParams& p,
                                              const typename V::Format& format, const uint8_t* memory, Ring ring, int chunks,
                                              int warp, int lane) {
  using Format = typename V::Format;
  const int group = warp / (4 * V::kTiles), tile_of_block = warp / 4 % V::kTiles;
  uint32_t place = TokenFragments<V::kTokenTiles>::place(lane);
  LanePlace lane_place = Format::place(warp % 4, lane);
  uint32_t before_weights = p.stages * V::kTokenBytes + tile_of_block * Format::kTileBytes;
  if constexpr (V::kTiles == 1) {  // there are registers to keep them
    place = unknown_to_compiler(place);
    lane_place = {unknown_to_compiler(lane_place.weights), unknown_to_compiler(lane_place.scales)};
    before_weights = unknown_to_compiler(before_weights);
    lane = unknown_to_compiler(lane);
  }
  const uint8_t* weights = memory + before_weights;
  // kChunks of the group, in stages side by side.
  const auto multiply = [&](auto number) {
    constexpr int kChunks = decltype(number)::value;
    Format formats[kChunks];
    for (int c = 0; c < kChunks; ++c) barrier_wait(ring.full(turn.slot + c * V::kWarpGroups), turn.parity);
    __syncwarp();
    const uint32_t tokens = ring.address + turn.slot * V::kTokenBytes;
    const uint8_t* tiles = weights + turn.slot * V::kWeightStride;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      formats[c] = format;
      const uint8_t* tile = tiles + c * V::kWarpGroups * V::kWeightStride;
      if constexpr (Format::kMoreBytes > 0)
        formats[c].load(tile, tile + V::kTiles * Format::kTileBytes + tile_of_block * (Format::kMoreBytes - Format::kTileBytes),
                        lane_place);
      else
        formats[c].load(tile, lane_place);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint32_t tokens_of_chunk = tokens + c * V::kWarpGroups * V::kTokenBytes;
      const float* x_scales = reinterpret_cast<const float*>(
          tiles + c * V::kWarpGroups * V::kWeightStride + V::kTileBytes - tile_of_block * Format::kTileBytes);
      if constexpr (V::kWgmma) multiply_wgmma<V>(sums, formats[c], tokens_of_chunk, x_scales, lane);
      else multiply_mma<V>(sums, formats[c], tokens_of_chunk, place, x_scales, lane);
    }
    __syncwarp();
    if (lane == 0)
      for (int c = 0; c < kChunks; ++c) barrier_arrive(ring.empty(turn.slot + c * V::kWarpGroups));
    turn.slot += kChunks * V::kWarpGroups;
    if (turn.slot >= p.stages) turn.slot -= p.stages, turn.parity ^= 1;
  };
  int i = group;
  if constexpr (V::kTurn > 1)
    for (; i + (V::kTurn - 1) * V::kWarpGroups < chunks; i += V::kTurn * V::kWarpGroups)
      multiply(std::integral_constant<int, V::kTurn>());
  for (; i < chunks; i += V::kWarpGroups) multiply(std::integral_constant<int, 1>());
}

// bfloat16 weights, from shared memory: while one chunk is multiplied, the stage of the chunk before is handed back.
template <class V>
__device__ __forceinline__ void consume_bf16(float (&sums)[V::kTokenTiles][4], Turn& turn, const LinearParams& p, Ring ring,
                                             int chunks, int warp, int lane) {
  constexpr int kTilesOfPart = V::kTokenTiles / V::kParts;
  using Part = float[kTilesOfPart][4];
  const uint32_t first_weights = ring.address + p.stages * V::kTokenBytes + warp / 4 * V::Format::kTileBytes;
  int previous = 0;
  for (int i = 0; i < chunks; ++i) {
    barrier_wait(ring.full(turn.slot), turn.parity);
    const uint32_t tokens = swizzled_tile_address(ring.address + turn.slot * V::kTokenBytes);
    const uint32_t weights = swizzled_tile_address(first_weights + turn.slot * V::kWeightStride);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < V::Format::kChunk / 16; ++step) {
#pragma unroll
      for (int part = 0; part < V::kParts; ++part)
        wgmma(*reinterpret_cast<Part*>(sums[part * kTilesOfPart]), swizzled_tile_descriptor(weights + step * 2),
              swizzled_tile_descriptor(tokens + part * V::kBoxTokens * 128 / 16 + step * 2));
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0 && lane == 0) barrier_arrive(ring.empty(previous));
    previous = turn.slot;
    if (++turn.slot == p.stages) turn.slot = 0, turn.parity ^= 1;
  }
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(ring.empty(previous));
}

// What adapters add to a unit's outputs is constant but for `between`: asked for now, it is in the L2 cache when sums are complete.
template <class V>
__device__ __forceinline__ void ask_for_adapters(const LinearParams& p, int first_output) {
  constexpr int kLine = 128 / 4, kLines = V::kOutputs / kLine;
  for (int i = threadIdx.x; i < (p.low_rank + 1) * kLines; i += V::kConsumers) {
    const int row = i / kLines, output = first_output + i % kLines * kLine;
    if (output >= p.out_features) continue;
    if (row < p.low_rank) prefetch_line(p.up + size_t(row) * p.out_features + output);
    else prefetch_line(p.first + output);
  }
}

// One unit after another; the ring runs on.
template <class V>
__device__ __forceinline__ void consume(const LinearParams& p, uint8_t* memory, Ring ring, Work<V> work, int warp,
                                        int lane) {
  using Format = typename V::Format;
  // Asked for now, looked at when sums are complete: on its way it waits behind the first weights.
  uint32_t shift = 0;
  if constexpr (Format::kHasShift) shift = load_constant(p.exponent_shift);
  Format format;
  if constexpr (Format::kPacked) format.prepare(p);  // what it loads, too, is needed with the first weights
  const auto begin = [&](int unit) {
    if constexpr (Format::kTables)
      format.template begin<V>(p, memory - V::kFrontBytes, work.first_tile(p, unit) + warp / 4 % V::kTiles, warp, lane);
  };
  if (work.first_unit < p.units) begin(work.first_unit);
  if (V::kOwnFirstTokens && p.copies_tokens) {
    wait_for_previous_kernel();
    copy_first_tokens<V>(p, ring, work, warp, lane);
    barrier_sync<V::kConsumers>();
  }
  float* total = reinterpret_cast<float*>(memory + (V::kOwnSums ? p.stages * V::kStageBytes : 0));
  Turn turn{warp / (4 * V::kTiles), 0};  // a group's first slot is its number
  for (int unit = work.first_unit; unit < p.units; unit += work.unit_step) {
    float sums[V::kTokenTiles][4] = {};
    if constexpr (V::kAdapted) ask_for_adapters<V>(p, work.first_tile(p, unit) * kTileOutputs);
    if (unit != work.first_unit) begin(unit);  // the tables of the unit before have been read
    if constexpr (Format::kPacked) consume_codes<V>(sums, turn, p, format, memory, ring, work.chunks, warp, lane);
    else consume_bf16<V>(sums, turn, p, ring, work.chunks, warp, lane);
    barrier_sync<V::kConsumers>();
    add_groups<V>(sums, total, warp, lane);
    float out_scale = Format::kOutScale;
    if constexpr (Format::kHasShift) out_scale *= __uint_as_float(unknown_to_compiler(shift) + 127 << 23);
    if constexpr (Format::kPrefix) out_scale *= Format::out_scale(p);
    const int first_token = work.first_token(p, unit);
    if constexpr (V::kAdapted) wait_for_previous_kernel();  // which wrote `between`; done long ago
    add_ranks<V>(p, ring, total, work.rank,
                 {min(V::kTokens, p.num_tokens - first_token), first_token, work.first_tile(p, unit) * kTileOutputs, out_scale});
  }
}

// Blocks of a cluster share 128 inputs at a time, whatever a chunk is: one order of sums for bfloat16 and what equals it.
template <class V>
__device__ __forceinline__ int first_chunk_of(const LinearParams& p, int rank) {
  constexpr int kOfShare = kTileInputs / V::Format::kChunk;
  if constexpr (kOfShare == 1) return p.chunks * rank / p.ranks;
  const int shares = (p.chunks + kOfShare - 1) / kOfShare;
  return min(shares * rank / p.ranks * kOfShare, p.chunks);
}

// What block `cluster` x rank of `clusters` does, in all of its shared memory.
template <class V>
__device__ __forceinline__ void linear_block(const Maps& maps, const LinearParams& p, int cluster, int clusters, int rank) {
  extern __shared__ __align__(1024) uint8_t front[];
  uint8_t* memory = front + V::kFrontBytes;
  const Ring ring{unknown_to_compiler(shared_address(memory))};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in every lane: uniform registers
  const int lane = threadIdx.x % 32;
  Work<V> work{cluster, clusters, rank};
  work.first_chunk = first_chunk_of<V>(p, work.rank);
  work.chunks = first_chunk_of<V>(p, work.rank + 1) - work.first_chunk;
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) barrier_init(ring.full(i), 1), barrier_init(ring.empty(i), 4 * V::kTiles);
    barrier_init(ring.others(), 1);
    barrier_init_done();
  }
  __syncthreads();
  if (V::kOwnSums && p.ranks > 1) cluster_begin();

  if (warp >= V::kConsumers / 32) {
    if constexpr (V::kMoveRegisters) release_registers<24>();
    if (warp == V::kConsumers / 32) {
      const Producer<V> producer{maps, p, ring, work, p.token_blocks == 1 ? policy_evict_first() : policy_evict_last(),
                                 policy_evict_last(), elect_lane()};
      producer.run();
    }
  } else {
    if constexpr (V::kMoveRegisters) take_registers<V::kRegisters>();
    consume<V>(p, memory, ring, work, warp, lane);
  }
}

// Grid: ranks (one cluster) x units, along x; neighbours share their weights in the L2 cache.
template <class V>
__global__ void __launch_bounds__(V::kThreads, V::kBlocks)
    linear_kernel(const __grid_constant__ Maps maps, const __grid_constant__ LinearParams p) {
  linear_block<V>(maps, p, int(blockIdx.x) / p.ranks, int(gridDim.x) / p.ranks, int(blockIdx.x) % p.ranks);
}

}  // namespace mlspec
