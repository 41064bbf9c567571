// How do weights and tokens come into a block's shared memory ahead of their use, however early the block starts?
//
// A producer thread keeps a ring of stages full: a chunk's weights of the block's 1 or 2 tiles, and the tokens of the same
// inputs. Tokens lie in front of all weights, so that neither pays for the alignment of the other.
// While the kernel in front still runs, weights are asked for, a few stages at a time: tokens would find a long queue in front
// of them, and nothing can be multiplied before. In a block with few tokens the threads that multiply copy the first tokens
// themselves, past the copy engine, which serves in order; weights of the whole ring may then be there before.
#pragma once

#include <type_traits>

#include "linear_formats.cuh"
#include "../mma.cuh"

namespace mlspec {

constexpr int kMaxStages = 32;

// Shared memory: tables of formats that have some, barriers (32 `full`, 32 `empty`, one for the sums of other blocks), the ring
// (aligned to 1024), sums. One address leads to all.
struct Ring {
  static constexpr int kFrontBytes = 1024, kBarrierBytes = (2 * kMaxStages + 2) * 8;
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int slot) const { return address - kBarrierBytes + slot * 8; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return address - kBarrierBytes + (kMaxStages + slot) * 8; }
  __device__ __forceinline__ uint32_t others() const { return address - kBarrierBytes + 2 * kMaxStages * 8; }
};

struct Maps {
  CUtensorMap x, weight;  // weight: bfloat16 only
};

struct LinearParams {
  const uint8_t* tiles;   // [output tile pair, chunk, tile of the pair], packed weights
  const uint8_t* more;    // likewise, of formats in two arrays
  const uint8_t* x;       // [tokens, x_row_bytes]
  const float* x_scales;  // [group, x_scale_stride], int8 activations only
  const void* bias;
  const int32_t* exponent_shift;
  const uint8_t* codebook;  // nested weights
  const half* tables;       // lookup-table planes
  void* out;                // [tokens, outputs], bfloat16 or float32
  int tile_stride;          // bytes from tile to tile of formats that read the front of a tile
  int zero_doubled;         // bit-planes
  int absent_planes;        // bit-planes of the weight that its tiles do not store
  const uint8_t* apart[7];  // those of them that are read, [output tile pair, chunk, tile of the pair] each
  int num_apart;
  const int32_t* widths;    // bit-planes: of each token, of which those of `width` planes are written; null: all are
  int width;
  int token_chunks;         // of x: chunks of the weight beyond them meet the tokens of the last
  int table_columns;        // of a row of tables
  int num_tokens, x_row_bytes, out_features, chunks, token_blocks, units, x_scale_stride, ranks, stages, stages_ahead;
  bool bias_is_float32, out_is_float32, copies_tokens;
  const float *between, *up;  // of adapters: [tokens, low_ranks], [low_rank, outputs]
  const int32_t* first;       // [outputs]
  int low_ranks, low_rank;
};

// One variant of the kernel. kTokens of a block: 8 kTokenTiles; kTiles of 64 outputs.
template <class FormatType, int kTokenTilesOf, int kTilesOf, bool kWgmmaOf, bool kAdaptedOf = false>
struct Variant {
  using Format = FormatType;
  using Dot = typename std::conditional<Format::kActivationBits == 8, int, float>::type;
  static constexpr int kTokenTiles = kTokenTilesOf, kTokens = kTokenTiles * 8, kTiles = kTilesOf;
  static constexpr bool kWgmma = kWgmmaOf, kAdapted = kAdaptedOf;  // kAdapted: adds what adapters add
  static constexpr int kOutputs = kTiles * kTileOutputs;
  static constexpr int kWarpGroups = Format::kWarpGroups;  // that share a tile's chunks
  static constexpr int kConsumers = kWarpGroups * kTiles * 128;
  // Of two tiles the producer gets a warp group of its own, so that registers can move from it to the consumers.
  static constexpr bool kMoveRegisters = kTiles == 2;
  static constexpr int kRegisters = kWarpGroups == 2 ? 112 : 232;
  static constexpr int kThreads = kConsumers + (kMoveRegisters ? 128 : 32);
  static constexpr int kBlocks = kTiles == 1 ? 2 : 1;  // on a multiprocessor
  static constexpr int kMostStages = kBlocks == 2 ? 16 : kMaxStages;
  // Chunks a group of warps takes in one turn of its loop. Few bits and tokens: bound by the number of instructions.
  static constexpr int kTurn = !kWgmma && kWarpGroups == 2 ? Format::kTurn : 1;
  // A box of the copy engine has at most 256 rows, an instruction at most 256 tokens.
  static constexpr int kParts = kTokens > 256 ? 2 : 1, kBoxTokens = kTokens / kParts;
  static constexpr int kBoxes = Format::kChunk * Format::kActivationBits / 8 / 128;  // of 128 bytes a token
  static constexpr int kTokenBytes = kTokens * 128 * kBoxes;
  static constexpr int kTileBytes = kTiles * (Format::kTileBytes + Format::kMoreBytes);
  static constexpr int kScaleBytes = Format::kActivationBits == 8 ? Format::kGroups * kTokens * 4 : 0;  // of tokens
  static constexpr int kWeightStride = (kTileBytes + kScaleBytes + 127) / 128 * 128;  // of weights, then scales of tokens
  static constexpr int kStageBytes = kTokenBytes + kWeightStride;
  // Sums in shared memory: padded rows, no bank conflict. Few have a place of their own, then the ring runs on while the
  // block finishes one tile and begins the next; many lie over the ring.
  static constexpr int kSumStride = kOutputs + 4, kSumBytes = kTokens * kSumStride * 4;
  static constexpr bool kOwnSums = kTiles == 1;
  static constexpr int kFrontBytes = Ring::kFrontBytes + (kTiles * Format::kTableBytes + 1023) / 1024 * 1024;
  static constexpr bool kOwnFirstTokens = kTokenTiles == 1;
  // Stages of weights in flight before the first tokens: enough to keep the memory busy, and tokens find a short queue.
  static constexpr int kAhead = kTiles == 1 ? (Format::kPacked ? 4 : 8) : kTokens > 64 || Format::kPacked ? 2 : 4;
  // The sums of a block: groups of 4 outputs of one token, dealt to the blocks of a cluster kConsumers at a time.
  static constexpr int kQuads = kTokens * kOutputs / 4;
  __host__ __device__ static constexpr int quads_of_rank(int ranks) {
    const int rounds = (kQuads + ranks * kConsumers - 1) / (ranks * kConsumers);
    return rounds * kConsumers < kQuads ? rounds * kConsumers : kQuads;
  }
};

// A block's share of the work: units of one output tile (two) and one block of tokens, of the same rank.
template <class V>
struct Work {
  int first_unit, unit_step, rank, first_chunk, chunks;
  __device__ __forceinline__ static int first_tile(const LinearParams& p, int unit) {
    return unit / p.token_blocks * V::kTiles;
  }
  __device__ __forceinline__ static int first_token(const LinearParams& p, int unit) {
    return unit % p.token_blocks * V::kTokens;
  }
  __device__ __forceinline__ int first_stages(const LinearParams& p) const {
    return min(chunks, V::kOwnFirstTokens && p.copies_tokens ? p.stages : p.stages_ahead);
  }
};

// Which inputs of x meet a chunk of the weight.
template <class Format>
__device__ __forceinline__ int token_chunk(const LinearParams& p, int chunk) {
  if constexpr (Format::kOutliers) return min(chunk, p.token_chunks - 1);
  return chunk;
}

// By the threads that multiply: the tokens of the first stages, one warp a stage. Rows beyond the tokens keep what they hold:
// a column of operand B reaches no other column's sums.
template <class V>
__device__ __forceinline__ void copy_first_tokens(const LinearParams& p, Ring ring, Work<V> work, int warp, int lane) {
  using Format = typename V::Format;
  constexpr int kRowBytes = V::kBoxes * 128, kPieces = kRowBytes / 16;
  const int first_token = work.first_token(p, work.first_unit), tokens = min(V::kTokens, p.num_tokens - first_token);
  for (int stage = warp; stage < work.first_stages(p); stage += V::kConsumers / 32) {
    const int chunk = token_chunk<Format>(p, work.first_chunk + stage);
    for (int i = lane; i < tokens * kPieces; i += 32) {
      const int token = i / kPieces, piece = i % kPieces, byte = chunk * kRowBytes + piece * 16;
      const uint32_t to = ring.address + stage * V::kTokenBytes + (piece / 8 * V::kTokens + token) * 128;
      const uint32_t place = to + ((piece ^ token) & 7) * 16;
      if (byte < p.x_row_bytes) copy_16(place, p.x + size_t(first_token + token) * p.x_row_bytes + byte);
      else store_zeros(place);
    }
    if constexpr (V::kScaleBytes > 0) {
      const uint32_t to = ring.address + p.stages * V::kTokenBytes + stage * V::kWeightStride + V::kTileBytes;
      for (int i = lane; i < tokens * Format::kGroups; i += 32) {
        const int token = i / Format::kGroups, group = i % Format::kGroups;
        copy_4(to + (group * V::kTokens + token) * 4,
               p.x_scales + size_t(chunk * Format::kGroups + group) * p.x_scale_stride + first_token + token);
      }
    }
  }
  wait_for_copies();
  fence_async_reads();  // by wgmma; and the copy engine writes here later
}

// One warp. All lanes walk along so that the compiler keeps places in uniform registers; one of them asks for the copies: with
// few tokens this thread's instructions decide how fast a ring is filled.
template <class V>
struct Producer {
  using Format = typename V::Format;
  const Maps& maps;
  const LinearParams& p;
  Ring ring;
  Work<V> work;
  uint64_t weight_policy, token_policy;
  bool elected;

  // Where a stage goes and comes from.
  struct Stage {
    uint32_t full, tokens, weights;
    const uint8_t *tile, *more;  // packed weights
    int chunk;
    uint32_t number;  // of the tile, of formats with planes apart
  };

  __device__ __forceinline__ Stage first_stage() const {
    return {ring.full(0), ring.address, ring.address + p.stages * V::kTokenBytes, nullptr, nullptr, 0, 0};
  }
  __device__ __forceinline__ void begin_unit(Stage& s, int unit) const {
    const int tile = work.first_tile(p, unit);
    s.chunk = work.first_chunk;
    const size_t number = (size_t(tile / 2) * p.chunks + s.chunk) * 2 + tile % 2;
    s.tile = p.tiles + number * tile_stride();
    if constexpr (Format::kMoreBytes > 0) s.more = p.more + number * Format::kMoreBytes;
    if constexpr (Format::kApart) s.number = uint32_t(number);
  }
  __device__ __forceinline__ int tile_stride() const { return Format::kPrefix ? p.tile_stride : Format::kTileBytes; }
  __device__ __forceinline__ void next(Stage& s) const {
    s.full += 8, s.tokens += V::kTokenBytes, s.weights += V::kWeightStride;
    s.tile += 2 * tile_stride(), ++s.chunk;
    if constexpr (Format::kMoreBytes > 0) s.more += 2 * Format::kMoreBytes;
    if constexpr (Format::kApart) s.number += 2;
  }
  // Of a format with planes apart: the front of each tile, and behind it plane by plane.
  __device__ __forceinline__ void load_apart(const Stage& s) const {
    const int front = Format::kTileBytes - p.num_apart * kPlaneBytes;
#pragma unroll
    for (int i = 0; i < V::kTiles; ++i) {
      const uint32_t to = s.weights + i * Format::kTileBytes;
      copy_bulk(to, s.tile + i * p.tile_stride, front, s.full, weight_policy);
#pragma unroll
      for (int k = 0; k < Format::kPlanes - 1; ++k)
        if (k < p.num_apart)
          copy_bulk(to + front + k * kPlaneBytes, p.apart[k] + size_t(s.number + i) * kPlaneBytes, kPlaneBytes, s.full, weight_policy);
    }
  }
  __device__ __forceinline__ void load_tiles(const Stage& s) const {
    if constexpr (Format::kApart) {
      if (p.num_apart) return load_apart(s);
    }
    if constexpr (Format::kPrefix) {
#pragma unroll
      for (int i = 0; i < V::kTiles; ++i)
        copy_bulk(s.weights + i * Format::kTileBytes, s.tile + i * p.tile_stride, Format::kTileBytes, s.full, weight_policy);
    } else {
      copy_bulk(s.weights, s.tile, V::kTiles * Format::kTileBytes, s.full, weight_policy);
    }
    if constexpr (Format::kMoreBytes > 0)
      copy_bulk(s.weights + V::kTiles * Format::kTileBytes, s.more, V::kTiles * Format::kMoreBytes, s.full, weight_policy);
  }
  __device__ __forceinline__ void wrap(Stage& s) const {
    s.full = ring.full(0), s.tokens = ring.address, s.weights = ring.address + p.stages * V::kTokenBytes;
  }
  // token_bytes: of tokens and their scales that complete on the same barrier.
  __device__ __forceinline__ void load_weights(const Stage& s, int unit, int token_bytes) const {
    if (!elected) return;
    barrier_arrive_expect(s.full, V::kTileBytes + token_bytes);
    const int output = work.first_tile(p, unit) * kTileOutputs;
    if constexpr (Format::kPacked) load_tiles(s);
    else copy_box(s.weights, &maps.weight, s.chunk * Format::kChunk, output, s.full, weight_policy);
  }
  __device__ __forceinline__ void load_tokens(const Stage& s, int first_token, int scale_bytes) const {
    if (!elected) return;
    constexpr int kBoxInputs = Format::kChunk / V::kBoxes;
    const int chunk = token_chunk<Format>(p, s.chunk);
#pragma unroll
    for (int box = 0; box < V::kBoxes * V::kParts; ++box)
      copy_box(s.tokens + box * V::kBoxTokens * 128, &maps.x, chunk * Format::kChunk + box % V::kBoxes * kBoxInputs,
               first_token + box / V::kBoxes * V::kBoxTokens, s.full, token_policy);
    if constexpr (V::kScaleBytes > 0) {
      const float* scales = p.x_scales + size_t(chunk * Format::kGroups) * p.x_scale_stride + first_token;
#pragma unroll
      for (int g = 0; g < Format::kGroups; ++g)
        copy_bulk(s.weights + V::kTileBytes + g * V::kTokens * 4, scales + g * p.x_scale_stride, scale_bytes, s.full,
                  token_policy);
    }
  }
  // Of one group.
  __device__ __forceinline__ int scale_bytes(int first_token) const {
    return V::kScaleBytes ? 4 * min(V::kTokens, p.x_scale_stride - first_token) : 0;
  }
  // The first stages. Weights do not depend on the kernel in front.
  __device__ __forceinline__ void run_ahead(Stage& s, int stages, int first_token, int token_bytes) const {
    const Stage first = s;
    const bool copied = V::kOwnFirstTokens && p.copies_tokens;
#pragma unroll 1
    for (int i = 0; i < stages; ++i, next(s)) {
      if (copied && i >= p.stages_ahead) barrier_wait(s.full - p.stages_ahead * 8, 0);
      load_weights(s, work.first_unit, copied ? 0 : token_bytes);
    }
    const bool reads_tokens = stages < work.chunks || work.first_unit + work.unit_step < p.units;
    if (!copied || reads_tokens) wait_for_previous_kernel();
    if (!copied) {
      s = first;
#pragma unroll 1
      for (int i = 0; i < stages; ++i, next(s)) load_tokens(s, first_token, scale_bytes(first_token));
    }
  }
  __device__ __forceinline__ void run() const {
    if (elected) prefetch_map(&maps.x);
    Stage s = first_stage();
    int slot = 0, round = 0;
#pragma unroll 1
    for (int unit = work.first_unit; unit < p.units; unit += work.unit_step) {
      const int first_token = work.first_token(p, unit), bytes = scale_bytes(first_token);
      const int token_bytes = V::kTokenBytes + Format::kGroups * bytes;
      int i = 0;
      begin_unit(s, unit);
      if (unit == work.first_unit) {
        i = slot = work.first_stages(p);
        run_ahead(s, i, first_token, token_bytes);
      }
#pragma unroll 1
      for (; i < work.chunks; ++i, ++slot, next(s)) {
        if (slot == p.stages) slot = 0, ++round, wrap(s);
        if (round) barrier_wait(s.full + kMaxStages * 8, (round - 1) & 1);  // empty
        load_weights(s, unit, token_bytes);
        load_tokens(s, first_token, bytes);
      }
    }
  }
};

}  // namespace mlspec
