// How do weights and tokens come into a block's shared memory ahead of their use, however early the block starts?
//
// A producer thread keeps a ring of stages full: a chunk's weights of the block's 1 or 2 tiles, and the tokens of the same
// inputs. Tokens lie in front of all weights, so that neither pays for the alignment of the other.
#pragma once

#include <type_traits>

#include "linear_formats.cuh"
#include "mma.cuh"

namespace mlspec {

constexpr int kMaxStages = 16;

// Shared memory: 16 barriers `full`, 16 `empty`, one `begun`, up to 1024 bytes; then the ring. One address leads to all.
struct Ring {
  static constexpr int kBarrierBytes = (2 * kMaxStages + 1) * 8;
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int slot) const { return address - kBarrierBytes + slot * 8; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return address - kBarrierBytes + (kMaxStages + slot) * 8; }
  __device__ __forceinline__ uint32_t begun() const { return address - 8; }
};

struct Maps {
  CUtensorMap x, weight;  // weight: bfloat16 only
};

struct LinearParams {
  const uint8_t* tiles;   // [output tile, chunk], 4-bit weights
  const float* x_scales;  // [group, x_scale_stride], int8 activations only
  const void* bias;
  const int32_t* exponent_shift;
  __nv_bfloat16* out;  // [tokens, outputs]
  int num_tokens, out_features, chunks, token_blocks, units, x_scale_stride, stages, stages_ahead;
  bool bias_is_float32;
};

// One variant of the kernel. kTokens of a block: 8 kTokenTiles; kTiles of 64 outputs.
template <class FormatType, int kTokenTilesOf, int kTilesOf, bool kWgmmaOf>
struct Variant {
  using Format = FormatType;
  using Dot = typename std::conditional<Format::kActivationBits == 8, int, float>::type;
  static constexpr int kTokenTiles = kTokenTilesOf, kTokens = kTokenTiles * 8, kTiles = kTilesOf;
  static constexpr bool kWgmma = kWgmmaOf;
  static constexpr int kOutputs = kTiles * kTileOutputs;
  static constexpr int kWarpGroups = Format::kFourBits ? 2 : 1;  // that share a tile's chunks
  static constexpr int kConsumers = kWarpGroups * kTiles * 128;
  // Of two tiles the producer gets a warp group of its own, so that registers can move from it to the consumers.
  static constexpr bool kMoveRegisters = kTiles == 2;
  static constexpr int kRegisters = Format::kFourBits ? 112 : 232;
  static constexpr int kThreads = kConsumers + (kMoveRegisters ? 128 : 32);
  static constexpr int kBlocks = kTiles == 1 ? 2 : 1;  // on a multiprocessor
  // Chunks a group of warps takes in one turn of its loop. 4-bit weights, few tokens: bound by the number of instructions.
  static constexpr int kTurn = !kWgmma && Format::kFourBits ? 2 : 1;
  // A box of the copy engine has at most 256 rows, an instruction at most 256 tokens.
  static constexpr int kParts = kTokens > 256 ? 2 : 1, kBoxTokens = kTokens / kParts;
  static constexpr int kBoxes = Format::kChunk * Format::kActivationBits / 8 / 128;  // of 128 bytes a token
  static constexpr int kTokenBytes = kTokens * 128 * kBoxes;
  static constexpr int kTileBytes = kTiles * Format::kTileBytes;
  static constexpr int kScaleBytes = Format::kActivationBits == 8 ? Format::kGroups * kTokens * 4 : 0;  // of tokens
  static constexpr int kWeightStride = (kTileBytes + kScaleBytes + 127) / 128 * 128;  // of weights, then scales of tokens
  static constexpr int kStageBytes = kTokenBytes + kWeightStride;
  // Sums in shared memory: padded rows, no bank conflict. Few have a place of their own, then the ring runs on while the
  // block finishes one tile and begins the next; many lie over the ring.
  static constexpr int kSumStride = kOutputs + 4, kSumBytes = kTokens * kSumStride * 4;
  static constexpr bool kOwnSums = kTiles == 1;
  // Stages whose weights are asked for before the first tokens: enough to keep the memory busy, few enough to be here first.
  static constexpr int kAhead = kTiles == 1 ? (Format::kFourBits ? 6 : 8) : kTokens > 64 || Format::kFourBits ? 2 : 4;
  // Cycles in which the memory brings a stage's weights to every block: the pace of asking for more than `stages_ahead`.
  static constexpr int kPace = kTileBytes * kBlocks / 24;
};

// A block's share of the work: units of one output tile (two) and one block of tokens, of the same rank.
template <class V>
struct Work {
  int first_unit, unit_step, first_chunk, chunks;
  __device__ __forceinline__ static int first_tile(const LinearParams& p, int unit) {
    return unit / p.token_blocks * V::kTiles;
  }
  __device__ __forceinline__ static int first_token(const LinearParams& p, int unit) {
    return unit % p.token_blocks * V::kTokens;
  }
};

template <class V>
struct Producer {
  using Format = typename V::Format;
  const Maps& maps;
  const LinearParams& p;
  Ring ring;
  Work<V> work;
  uint64_t weight_policy, token_policy;

  __device__ __forceinline__ int scale_bytes(int first_token) const {
    if constexpr (V::kScaleBytes == 0) return 0;
    return Format::kGroups * 4 * min(V::kTokens, p.x_scale_stride - first_token);
  }
  __device__ __forceinline__ void load_weights(int unit, int i, int slot) {
    const int tile = work.first_tile(p, unit), chunk = work.first_chunk + i;
    const uint32_t place = ring.address + p.stages * V::kTokenBytes + slot * V::kWeightStride;
    barrier_arrive_expect(ring.full(slot), V::kTokenBytes + V::kTileBytes + scale_bytes(work.first_token(p, unit)));
    if constexpr (Format::kFourBits) {
      const size_t first = (size_t(tile / 2) * p.chunks + chunk) * 2 + tile % 2;
      copy_bulk(place, p.tiles + first * Format::kTileBytes, V::kTileBytes, ring.full(slot), weight_policy);
    } else {
      copy_box(place, &maps.weight, chunk * Format::kChunk, tile * kTileOutputs, ring.full(slot), weight_policy);
    }
  }
  __device__ __forceinline__ void load_tokens(int unit, int i, int slot) {
    const int chunk = work.first_chunk + i, first_token = work.first_token(p, unit);
    constexpr int kBoxInputs = Format::kChunk / V::kBoxes;
#pragma unroll
    for (int box = 0; box < V::kBoxes * V::kParts; ++box)
      copy_box(ring.address + slot * V::kTokenBytes + box * V::kBoxTokens * 128, &maps.x,
               chunk * Format::kChunk + box % V::kBoxes * kBoxInputs, first_token + box / V::kBoxes * V::kBoxTokens,
               ring.full(slot), token_policy);
    if constexpr (V::kScaleBytes > 0) {
      const uint32_t place = ring.address + p.stages * V::kTokenBytes + slot * V::kWeightStride + V::kTileBytes;
      const int bytes = scale_bytes(first_token) / Format::kGroups;
      for (int g = 0; g < Format::kGroups; ++g)
        copy_bulk(place + g * V::kTokens * 4, p.x_scales + size_t(chunk * Format::kGroups + g) * p.x_scale_stride + first_token,
                  bytes, ring.full(slot), token_policy);
    }
  }
  // Some weights at once, they do not depend on the kernel in front. As long as that one runs, the rest of the ring, no faster
  // than the memory brings it: copies arrive in the order they are asked for, nothing can be multiplied before the first
  // tokens are here, and those must not queue behind a whole ring.
  __device__ __forceinline__ int run_ahead(int most) {
    int ahead = min(most, p.stages_ahead);
    for (int i = 0; i < ahead; ++i) load_weights(work.first_unit, i, i);
    uint32_t last = clock();
    while (!barrier_test(ring.begun(), 0)) {
      if (ahead == most || uint32_t(clock()) - last < V::kPace) continue;
      load_weights(work.first_unit, ahead, ahead);
      ++ahead, last = clock();
    }
    wait_for_previous_kernel();
    for (int i = 0; i < ahead; ++i) load_tokens(work.first_unit, i, i);
    return ahead;
  }
  __device__ __forceinline__ void run() {
    prefetch_map(&maps.x);
    const int ahead = run_ahead(min(work.chunks, p.stages));
    int slot = ahead % p.stages, round = ahead / p.stages, begin = ahead;
    for (int unit = work.first_unit; unit < p.units; unit += work.unit_step) {
      for (int i = begin; i < work.chunks; ++i) {
        if (round) barrier_wait(ring.empty(slot), (round - 1) & 1);
        load_weights(unit, i, slot);
        load_tokens(unit, i, slot);
        if (++slot == p.stages) slot = 0, ++round;
      }
      begin = 0;
    }
  }
};

}  // namespace mlspec
