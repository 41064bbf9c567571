// How does a block multiply the packed weights of 64 or 128 outputs with up to 128 tokens, the same bits for any number?
//
// Inputs are cut into chunks of 128. The chunks of a tile of 64 outputs are dealt to the blocks of one cluster (their number
// depends on the weight's shape alone), each block's chunks alternately to two groups of four warps. A group sums its
// chunks in ascending order; the sums are added group 0 + group 1 in each block, then over blocks by rank. A token is a
// column of operand B: neither the number of columns nor their place changes what the tensor cores add, nor in what order,
// and mma and wgmma add alike (checked bit for bit by eval/bench_gpu_linear.py).
// A producer keeps a ring of stages full: a chunk's weights of the block's 1 or 2 tiles, and the tokens of the same inputs.
#pragma once

#include <type_traits>

#include "linear_formats.cuh"
#include "mma.cuh"

namespace mlspec {

constexpr int kGroups = 2;
constexpr int kMaxStages = 16;

// Shared memory: 16 barriers `full`, 16 `empty`, the ring (aligned to 1024). One address leads to all.
struct Ring {
  static constexpr int kBarrierBytes = 2 * kMaxStages * 8;
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int slot) const { return address - kBarrierBytes + slot * 8; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return address - kBarrierBytes / 2 + slot * 8; }
};

struct LinearParams {
  const uint8_t* tiles;   // [output tile, chunk]
  const float* x_scales;  // [group, x_scale_stride], int8 activations only
  const __nv_bfloat16* bias;
  __nv_bfloat16* out;  // [tokens, outputs]
  int num_tokens, out_features, chunks, token_blocks, x_scale_stride, stages, stages_ahead;
  float out_scale;
};

// One variant of the kernel. kTokens of a block: 8 kTokenTiles; kTiles of 64 outputs.
template <class FormatType, int kTokenTilesOf, int kTilesOf, bool kWgmmaOf>
struct Variant {
  using Format = FormatType;
  using Dot = typename std::conditional<Format::kActivationBits == 8, int, float>::type;
  static constexpr int kTokenTiles = kTokenTilesOf, kTokens = kTokenTiles * 8, kTiles = kTilesOf;
  static constexpr bool kWgmma = kWgmmaOf;
  static constexpr int kOutputs = kTiles * kTileOutputs;
  static constexpr int kConsumers = kGroups * kTiles * 128;
  // With 512 consumers the producer gets a warp group of its own, so that registers can move from it to them.
  static constexpr bool kMoveRegisters = kTiles == 2;
  static constexpr int kThreads = kConsumers + (kMoveRegisters ? 128 : 32);
  static constexpr int kBlocks = kTiles == 1 ? 2 : 1;  // on a multiprocessor
  // Chunks a group of warps takes in one turn of its loop. 4-bit weights, few tokens: bound by the number of instructions.
  static constexpr int kTurn = !kWgmma && Format::kFourBits ? 2 : 1;
  // A stage: tokens, tiles, scales of tokens.
  static constexpr int kTokenBytes = kTokens * kTileInputs * Format::kActivationBits / 8;
  static constexpr int kBoxes = Format::kActivationBits / 8;  // of 128 bytes a token
  static constexpr int kTileBytes = kTiles * Format::kTileBytes;
  static constexpr int kScaleBytes = Format::kActivationBits == 8 ? Format::kGroups * kTokens * 4 : 0;
  static constexpr int kStageBytes = (kTokenBytes + kTileBytes + kScaleBytes + 1023) / 1024 * 1024;
  static constexpr int kSumStride = kOutputs + 4;  // of the sums in shared memory: no bank conflict
};

template <class V>
struct Producer {
  using Format = typename V::Format;
  const CUtensorMap* x_map;
  const LinearParams& p;
  Ring ring;
  const uint8_t* tiles;  // of chunk 0
  int first_chunk, first_token;
  uint64_t weight_policy, token_policy;

  __device__ __forceinline__ int scale_bytes() const {
    if constexpr (V::kScaleBytes == 0) return 0;
    return Format::kGroups * 4 * min(V::kTokens, p.x_scale_stride - first_token);
  }
  __device__ __forceinline__ void load_weights(int i, int slot) {
    barrier_arrive_expect(ring.full(slot), V::kTokenBytes + V::kTileBytes + scale_bytes());
    copy_bulk(ring.address + slot * V::kStageBytes + V::kTokenBytes, tiles + size_t(first_chunk + i) * 2 * Format::kTileBytes,
              V::kTileBytes, ring.full(slot), weight_policy);
  }
  __device__ __forceinline__ void load_tokens(int i, int slot) {
    const uint32_t stage = ring.address + slot * V::kStageBytes;
    const int chunk = first_chunk + i;
#pragma unroll
    for (int box = 0; box < V::kBoxes; ++box)
      copy_box(stage + box * V::kTokens * 128, x_map, chunk * kTileInputs + box * 64, first_token, ring.full(slot), token_policy);
    if constexpr (V::kScaleBytes > 0) {
      for (int g = 0; g < Format::kGroups; ++g)
        copy_bulk(stage + V::kTokenBytes + V::kTileBytes + g * V::kTokens * 4,
                  p.x_scales + size_t(chunk * Format::kGroups + g) * p.x_scale_stride + first_token,
                  scale_bytes() / Format::kGroups, ring.full(slot), token_policy);
    }
  }
  // Some weights first, they do not depend on the kernel before; the tokens of these stages next: copies arrive in the order
  // they are asked for, and nothing can be multiplied before the first tokens are here.
  __device__ __forceinline__ void run(int chunks) {
    prefetch_map(x_map);
    const int ahead = min(chunks, min(p.stages, p.stages_ahead));
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
    wait_for_previous_kernel();
    for (int i = 0; i < ahead; ++i) load_tokens(i, i);
    int slot = ahead % p.stages, parity = 1;
    for (int i = ahead; i < chunks; ++i) {
      if (slot == 0) parity ^= 1;
      if (i >= p.stages) barrier_wait(ring.empty(slot), parity);
      load_weights(i, slot);
      load_tokens(i, slot);
      if (++slot == p.stages) slot = 0;
    }
  }
};

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

// sums += scale of the row (and of the token) * dots; dots of int8 activations hold 16 times the codes.
template <class V>
__device__ __forceinline__ void add_scaled(float (&sums)[V::kTokenTiles][4], const typename V::Dot (&dots)[V::kTokenTiles][4],
                                           const typename V::Format& format, const float* x_scales, const int (*token_sums)[4],
                                           int group, int lane) {
  const float2 scale = format.scale(group);
#pragma unroll
  for (int t = 0; t < V::kTokenTiles; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float row_scale = c < 2 ? scale.x : scale.y;
      if constexpr (V::Format::kActivationBits == 8) {
        int dot = dots[t][c];
        if constexpr (V::Format::kHasZeros) {
          const uchar2 zero = format.zero(group);
          dot -= ((c < 2 ? zero.x : zero.y) - 8) * 16 * token_sums[t][c % 2];
        }
        row_scale = __fmul_rn(row_scale, x_scales[group * V::kTokens + t * 8 + lane % 4 * 2 + c % 2]);
        sums[t][c] = __fmaf_rn(float(dot), row_scale, sums[t][c]);
      } else {
        sums[t][c] = __fmaf_rn(dots[t][c], row_scale, sums[t][c]);
      }
    }
  }
}

// Steps of a chunk, and those whose dots share a scale.
template <class Format>
struct Steps {
  static constexpr int kAll = Format::kActivationBits == 8 ? 4 : 8;
  static constexpr bool kScaled = Format::kGroups > 0, kTokenSums = Format::kActivationBits == 8 && Format::kHasZeros;
  static constexpr int kGroups = kScaled ? Format::kGroups : 1, kOfGroup = kAll / kGroups;
};

// One chunk by mma: every warp on its own.
template <class V>
__device__ __forceinline__ void multiply_mma(float (&sums)[V::kTokenTiles][4], const typename V::Format& format, uint32_t tokens,
                                             uint32_t place, const float* x_scales, int lane) {
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
__device__ __forceinline__ void multiply_wgmma(float (&sums)[V::kTokenTiles][4], const typename V::Format& format, uint32_t tokens,
                                               const float* x_scales, int lane) {
  using S = Steps<typename V::Format>;
  constexpr int kBoxStep = V::kTokens * 128 / 16;
  const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
  const uint32_t descriptor = swizzled_tile_address(tokens);
  // With 128 tokens the sums leave registers for half of the steps only.
  constexpr int kBatch = V::kTokenTiles >= 16 ? S::kAll / 2 : S::kAll;
  static_assert(kBatch == S::kAll || !S::kScaled, "scaled groups are not cut");
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
        if constexpr (S::kScaled) wgmma(dots, a[i], b, i > g * S::kOfGroup);
        else wgmma(sums, a[i], b, true);
        if constexpr (S::kTokenSums) wgmma(token_sums, ones, b, i > g * S::kOfGroup);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if constexpr (S::kScaled) add_scaled<V>(sums, dots, format, x_scales, token_sums, g, lane);
    }
  }
}

// The block's sums to shared memory: [token, output], group 0 + group 1.
template <class V>
__device__ __forceinline__ void add_groups(const float (&sums)[V::kTokenTiles][4], float* total, int warp, int lane) {
  for (int group = kGroups - 1; group >= 0; --group) {
    if (warp / (4 * V::kTiles) == group) {
      const int first_row = warp % (4 * V::kTiles) * 16 + lane / 4;
#pragma unroll
      for (int t = 0; t < V::kTokenTiles; ++t) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& place = total[(t * 8 + lane % 4 * 2 + c % 2) * V::kSumStride + first_row + c / 2 * 8];
          place = group == kGroups - 1 ? sums[t][c] : __fadd_rn(sums[t][c], place);
        }
      }
    }
    barrier_sync<V::kConsumers>();
  }
}

__device__ __forceinline__ void store_outputs(const LinearParams& p, float4 sum, int token, int output) {
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  __nv_bfloat16* out = p.out + size_t(token) * p.out_features + output;
  __nv_bfloat16 rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value = __fmul_rn(values[i], p.out_scale);
    if (p.bias && output + i < p.out_features) value = __fadd_rn(value, __bfloat162float(p.bias[output + i]));
    rounded[i] = __float2bfloat16_rn(value);
  }
  if (p.out_features % 4 == 0 && output < p.out_features) {
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(rounded);
  } else {
    for (int i = 0; i < 4; ++i)
      if (output + i < p.out_features) out[i] = rounded[i];
  }
}

// Sums of the blocks of the cluster, by rank; each block finishes its share of the outputs.
template <class V>
__device__ __forceinline__ void add_ranks(const LinearParams& p, const float* total, int tokens, int first_token, int first_output) {
  const int ranks = cluster_size(), rank = cluster_rank();
  constexpr int kQuads = V::kOutputs / 4;
  if (ranks > 1) cluster_sync();
  for (int i = rank * V::kConsumers + threadIdx.x; i < tokens * kQuads; i += ranks * V::kConsumers) {
    const int token = i / kQuads, row = i % kQuads * 4;
    const float* place = total + token * V::kSumStride + row;
    float4 sum = {0, 0, 0, 0};
    if (ranks == 1) sum = *reinterpret_cast<const float4*>(place);
    for (int other = 0; ranks > 1 && other < ranks; ++other) {
      const float4 part = load_cluster(shared_address(place), other);
      sum.x = __fadd_rn(sum.x, part.x), sum.y = __fadd_rn(sum.y, part.y);
      sum.z = __fadd_rn(sum.z, part.z), sum.w = __fadd_rn(sum.w, part.w);
    }
    store_outputs(p, sum, first_token + token, first_output + row);
  }
  if (ranks > 1) cluster_exit();  // the others may still read this block's memory
}

template <class V>
__device__ __forceinline__ void consume(float (&sums)[V::kTokenTiles][4], const LinearParams& p, const uint8_t* stages, Ring ring,
                                        int chunks, int warp, int lane) {
  using Format = typename V::Format;
  const int group = warp / (4 * V::kTiles), tile_of_block = warp / 4 % V::kTiles;
  uint32_t place = TokenFragments<V::kTokenTiles>::place(lane);
  LanePlace lane_place = Format::place(warp % 4, lane);
  if constexpr (V::kTiles == 1) {  // there are registers to keep them
    place = unknown_to_compiler(place);
    lane_place = {unknown_to_compiler(lane_place.weights), unknown_to_compiler(lane_place.scales)};
  }
  Format format;
  format.prepare();
  int slot = group, parity = 0;
  // kChunks of the group, in stages side by side.
  const auto multiply = [&](auto number) {
    constexpr int kChunks = decltype(number)::value;
    Format formats[kChunks];
    for (int c = 0; c < kChunks; ++c) barrier_wait(ring.full(slot + c * kGroups), parity);
    __syncwarp();
    const uint32_t tokens = ring.address + slot * V::kStageBytes;
    const uint8_t* tiles = stages + slot * V::kStageBytes + V::kTokenBytes;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      formats[c] = format;
      formats[c].load(tiles + c * kGroups * V::kStageBytes + tile_of_block * Format::kTileBytes, lane_place);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int stage = c * kGroups * V::kStageBytes;
      const float* x_scales = reinterpret_cast<const float*>(tiles + stage + V::kTileBytes);
      if constexpr (V::kWgmma) multiply_wgmma<V>(sums, formats[c], tokens + stage, x_scales, lane);
      else multiply_mma<V>(sums, formats[c], tokens + stage, place, x_scales, lane);
    }
    __syncwarp();
    if (lane == 0)
      for (int c = 0; c < kChunks; ++c) barrier_arrive(ring.empty(slot + c * kGroups));
    slot += kChunks * kGroups;
    if (slot >= p.stages) slot -= p.stages, parity ^= 1;
  };
  int i = group;
  if constexpr (V::kTurn > 1)
    for (; i + (V::kTurn - 1) * kGroups < chunks; i += V::kTurn * kGroups) multiply(std::integral_constant<int, V::kTurn>());
  for (; i < chunks; i += kGroups) multiply(std::integral_constant<int, 1>());
}

// Grid: ranks (one cluster) x blocks of tokens x tiles of outputs, in this order along x: blocks that run at the same time
// share their weights in the L2 cache.
template <class V>
__global__ void __launch_bounds__(V::kThreads, V::kBlocks)
    linear_kernel(const __grid_constant__ CUtensorMap x_map, const LinearParams p) {
  extern __shared__ uint8_t unaligned[];
  uint8_t* stages = unaligned + 2048 - (shared_address(unaligned) + 1024) % 1024;
  const Ring ring{unknown_to_compiler(shared_address(stages))};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // known to be the same in every lane: uniform registers
  const int lane = threadIdx.x % 32;
  const int ranks = cluster_size(), rank = cluster_rank(), cluster = blockIdx.x / ranks;
  const int first_tile = cluster / p.token_blocks * V::kTiles, first_token = cluster % p.token_blocks * V::kTokens;
  const int first_chunk = p.chunks * rank / ranks, chunks = p.chunks * (rank + 1) / ranks - first_chunk;
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) barrier_init(ring.full(i), 1), barrier_init(ring.empty(i), 4 * V::kTiles);
    barrier_init_done();
  }
  __syncthreads();

  if (warp >= V::kConsumers / 32) {
    if constexpr (V::kMoveRegisters) release_registers<24>();
    if (threadIdx.x == V::kConsumers) {
      const uint8_t* tiles = p.tiles + (size_t(first_tile / 2) * p.chunks * 2 + first_tile % 2) * V::Format::kTileBytes;
      Producer<V> producer{&x_map, p, ring, tiles, first_chunk, first_token,
                           p.token_blocks == 1 ? policy_evict_first() : policy_evict_last(), policy_evict_last()};
      producer.run(chunks);
    }
  } else {
    if constexpr (V::kMoveRegisters) take_registers<112>();
    float sums[V::kTokenTiles][4] = {};
    consume<V>(sums, p, stages, ring, chunks, warp, lane);
    barrier_sync<V::kConsumers>();
    float* total = reinterpret_cast<float*>(stages);
    add_groups<V>(sums, total, warp, lane);
    add_ranks<V>(p, total, min(V::kTokens, p.num_tokens - first_token), first_token, first_tile * kTileOutputs);
  }
}

}  // namespace mlspec
