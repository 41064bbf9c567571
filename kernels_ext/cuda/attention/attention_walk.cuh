// Which queries does a block have, and which chunks of slots does it go through, in which order?
//
// The slots of a row are chunks of 64 at absolute positions, c = 0, 1 .. Chunk c belongs to team c mod 8, and there to rank
// c / 8 mod 4. A rank goes through its chunks in ascending order; the results of a team's ranks are merged in the order 0 to 3,
// those of the teams in the order 0 to 7. A draft window leaves chunk 0, the first slots, and the last ones: those between are
// skipped, and all others stay where they are.
#pragma once

#include "attention_tile.cuh"

namespace mlspec {

static_assert(kChunk == 64, "FIRST_SLOTS of hf_mlspec/ops/attention_plain.py");

constexpr int kTeams = 8, kTeamRanks = 4, kRanks = kTeams * kTeamRanks;  // ranks in one line: team by team

constexpr float kLog2E = 1.4426950408889634f;

struct AttentionArgs {
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  mlspec_cuda_tokens tokens;
  mlspec_cuda_cache cache;
  ScoreRule rule;
  int heads, group;  // query heads, and of one key head
  int tiles, teams, stages;  // teams: blocks that share a tile, 1 or 8
  mlspec_cuda_scales scales;
  const float* sinks;
};

inline const char* read_arguments(AttentionArgs* args, const mlspec_cuda_attention& attention, const mlspec_cuda_tokens& tokens,
                                  const mlspec_cuda_cache& cache) {
  if (cache.dim % 16 || cache.dim < 16 || cache.dim > 256) return "head_dim must be a multiple of 16 up to 256";
  if (cache.batch > 65535 || cache.kv_heads > 65535) return "a call takes up to 65535 rows and key heads";
  if (cache.slots > INT32_MAX - kChunk || tokens.width * attention.heads > INT32_MAX / kTeams)
    return "a row has too many slots or queries for 32-bit numbers";
  const bool capped = attention.softcap > 0.f;
  const float inner = capped ? attention.scale / attention.softcap : attention.scale * kLog2E;
  const bool shaped = capped || !(inner > 0.f);  // a maximum of products is none of scores then
  const int64_t window = attention.window < INT32_MAX ? attention.window : 0;
  const int64_t draft = attention.draft_window < INT32_MAX ? attention.draft_window : 0;
  const ScoreRule rule{shaped ? 1.f : inner, inner, attention.softcap * kLog2E, shaped, capped,
                       int(window), int(window == 0 ? draft : draft == 0 ? window : window < draft ? window : draft)};
  *args = {static_cast<const __nv_bfloat16*>(attention.q), static_cast<__nv_bfloat16*>(attention.out), tokens, cache, rule,
           int(attention.heads), int(attention.heads / cache.kv_heads), 0, 0, 0, attention.scales, attention.sinks};
  return nullptr;
}

// The chunks that a row sees at most, in slots of which so many are allocated.
inline int64_t most_chunks(const AttentionArgs& args) {
  const int64_t all = (args.cache.slots + kChunk - 1) / kChunk;
  if (args.rule.recent == args.rule.window) return all;
  const int64_t seen = 2 + (args.rule.recent + args.tokens.width + kChunk - 1) / kChunk;  // chunk 0, and one cut by an edge
  return seen < all ? seen : all;
}

// The tile of one block: rows [first_row, + kRows) of tokens x group, of one key head of one row of the batch.
struct Tile {
  int batch_row, kv_head, first_row, team;
  int start, count;         // of the batch row; count: real tokens
  int first_token, end_token;  // real tokens that have rows here

  __device__ Tile(const AttentionArgs& a, int rows) {
    const int index = blockIdx.x / a.teams;
    team = blockIdx.x % a.teams;
    first_row = (a.tiles - 1 - index) * rows;  // the last tokens see most: they start first
    kv_head = blockIdx.y;
    batch_row = blockIdx.z;
    read_lengths(a, rows);
  }

  // Volatile: read anew behind wait_for_previous_kernel(), in front of which they may have been old.
  __device__ void read_lengths(const AttentionArgs& a, int rows) {
    start = reinterpret_cast<const volatile int32_t*>(a.tokens.starts)[batch_row];
    const int64_t room = start < 0 ? 0 : a.cache.slots - start;
    const int64_t asked = reinterpret_cast<const volatile int32_t*>(a.tokens.counts)[batch_row];
    count = int(min(min(asked, a.tokens.width), room));
    first_token = first_row / a.group;
    end_token = min(count, (first_row + rows + a.group - 1) / a.group);
  }

  __device__ bool is_padding() const { return first_token >= end_token; }
  __device__ int end_slot() const { return start + end_token; }
  __device__ int first_chunk(int window) const {
    return window == 0 ? 0 : max(0, start + first_token - window + 1) / kChunk;
  }
};

// The query of a tile's row, null for padding.
__device__ __forceinline__ const __nv_bfloat16* query_of(const AttentionArgs& a, const Tile& tile, int row) {
  const int index = tile.first_row + row, token = index / a.group;
  if (token >= tile.end_token) return nullptr;
  const int64_t at = (tile.batch_row * a.tokens.width + token) * a.heads + tile.kv_head * a.group + index % a.group;
  return a.q + at * a.cache.dim;
}

// The chunks that some token of a tile may see: low to high, and chunk 0 where `skips`: it lies in front of a hole.
struct Seen {
  int low, high;
  bool skips;

  __device__ Seen(const ScoreRule& rule, const Tile& tile)
      : low(tile.first_chunk(rule.recent)),
        high((tile.end_slot() - 1) / kChunk),
        skips(low > 0 && tile.first_chunk(rule.window) == 0) {}
};

// The chunks of ranks [rank, end), rank by rank.
struct Walk {
  Seen seen;
  int rank, end, chunk;

  __device__ Walk(const Seen& seen_, int rank_, int end_) : seen(seen_), rank(rank_), end(end_) {
    chunk = first();
    settle();
  }
  __device__ int first() const {
    const int place = rank / kTeamRanks + rank % kTeamRanks * kTeams;  // the rank's first chunk
    return seen.skips && place == 0 ? 0 : behind_hole(place);
  }
  // The first chunk of those from `low` on that is a chunk of this place.
  __device__ int behind_hole(int place) const { return seen.low + ((place - seen.low) & (kRanks - 1)); }
  __device__ void settle() {
    while (chunk > seen.high && ++rank < end) chunk = first();
  }
  __device__ bool done() const { return rank >= end; }
  __device__ int team() const { return rank / kTeamRanks; }
  __device__ void next() {
    chunk = seen.skips && chunk == 0 ? behind_hole(0) : chunk + kRanks;
    settle();
  }
  __device__ void next_if() {
    if (!done()) next();
  }
};

// What the weighted sums of a tile's row are multiplied by: 1 over its sum of weights, among them that of the head's sink; 0 for rows
// without slots.
__device__ __forceinline__ float share_of(const AttentionArgs& a, const Tile& tile, int row, float largest, float sum) {
  if (sum == 0.f) return 0.f;
  if (!a.sinks) return 1.f / sum;
  const Merge with(largest, __fmul_rn(a.sinks[tile.kv_head * a.group + (tile.first_row + row) % a.group], kLog2E));
  return with.own / with(sum, 1.f);
}

// Elements `element`, + 1 of row `row` of a tile; rows and elements behind the tensor's are dropped.
__device__ __forceinline__ void write_pair(const AttentionArgs& a, const Tile& tile, int row, int element, float low, float high) {
  const int index = tile.first_row + row, token = index / a.group;
  if (token >= a.tokens.width || element >= a.cache.dim) return;
  const int64_t at = (tile.batch_row * a.tokens.width + token) * a.heads + tile.kv_head * a.group + index % a.group;
  *reinterpret_cast<uint32_t*>(a.out + at * a.cache.dim + element) = narrowed(low, high);
}

}  // namespace mlspec
