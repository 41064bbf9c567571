// How do the weights and tokens of a chunk come into shared memory on any GPU since sm_80? By cp.async, a few stages ahead.
//
// A group of four warps keeps a ring of stages full: the weights of a chunk and the tokens of the same inputs, these in rows of 128
// bytes whose 16-byte pieces are exchanged (piece ^ row % 8), so that ldmatrix meets no bank twice.
#pragma once

#include "../linear/linear_formats.cuh"
#include "../mma.cuh"

namespace mlspec::portable {

constexpr int kGroupsOfWarps = 2, kGroupThreads = 128, kThreads = kGroupsOfWarps * kGroupThreads;
constexpr int kRingBytes = 99 * 1024;  // every GPU since sm_80 gives a block as much
constexpr int kMostStages = 6;

struct Params {
  const uint8_t* weights;  // packed tiles or the row-major weight
  const uint8_t* more;     // tiles of formats in two arrays
  const uint8_t* x;
  const float* x_scales;
  const void* bias;
  const int32_t* exponent_shift;
  const uint8_t* codebook;
  const half* tables;
  void* out;
  int64_t x_scale_stride;
  int num_tokens, in_features, out_features, chunks, token_chunks, token_blocks, tile_stride, zero_doubled, num_planes, table_columns;
  int absent_planes, num_apart;
  const uint8_t* apart[7];  // bit-planes behind those of the tiles
  bool aligned, bias_is_float32, out_is_float32;
};

// kKept: bytes of a block that its kernel has uses of its own for. kMost: stages at most.
template <class FormatType, int kTokenTilesOf, int kKept = 0, int kMost = kMostStages>
struct Variant {
  using Format = FormatType;
  using Dot = typename std::conditional<Format::kActivationBits == 8, int, float>::type;
  static constexpr int kTokenTiles = kTokenTilesOf, kTokens = 8 * kTokenTiles;
  static constexpr int kRowBytes = Format::kChunk * Format::kActivationBits / 8;  // of a token and chunk: 128 or 256
  static constexpr int kTokenBytes = kTokens * kRowBytes, kTileBytes = Format::kTileBytes + Format::kMoreBytes;
  static constexpr int kScaleBytes = Format::kActivationBits == 8 ? Format::kGroups * kTokens * 4 : 0;
  static constexpr int kStageBytes = (kTokenBytes + kTileBytes + kScaleBytes + 127) / 128 * 128;
  static constexpr int kFitting = (kRingBytes - kKept - Format::kTableBytes) / kGroupsOfWarps / kStageBytes;
  static constexpr int kStages = kFitting < kMost ? kFitting : kMost;
  static constexpr int kSumStride = kTileOutputs + 4;  // of the sums in shared memory: no bank conflict
  static constexpr int kRingsBytes = kGroupsOfWarps * kStages * kStageBytes;  // tables stand behind
  static constexpr int kSharedBytes = kRingsBytes + Format::kTableBytes;
  static_assert(kStages >= 2, "nothing would be copied ahead");
  static_assert(kTokens * kSumStride * 4 <= kRingsBytes, "the sums lie where the ring was");
};

__device__ __forceinline__ void sync_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
}

// 8 bfloat16 of a row that starts at any address.
__device__ __forceinline__ void copy_unaligned(uint32_t to, const uint16_t* from, int count) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) words[i / 2] |= uint32_t(from[i]) << 16 * (i % 2);
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// kRows rows of a row-major matrix, kRowBytes of each from byte `first_byte` on: rows of 128 bytes in shared memory, pieces
// exchanged; what lies beyond the last row or column is zeros.
template <int kRows, int kRowBytes>
__device__ __forceinline__ void copy_rows(uint32_t to, const uint8_t* matrix, int64_t first_row, int64_t rows, int64_t first_byte,
                                          int64_t bytes_of_row, bool aligned, int thread) {
  constexpr int kPieces = kRowBytes / 16;
#pragma unroll
  for (int i = thread; i < kRows * kPieces; i += kGroupThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const int64_t byte = first_byte + piece * 16;
    const uint32_t place = to + piece / 8 * (kRows * 128) + row * 128 + ((piece % 8 ^ row % 8) << 4);
    const bool inside = first_row + row < rows && byte < bytes_of_row;
    const uint8_t* from = inside ? matrix + (first_row + row) * bytes_of_row + byte : matrix;
    if (aligned) copy_async(place, from, inside);
    else copy_unaligned(place, reinterpret_cast<const uint16_t*>(from), inside ? int(min(int64_t(8), (bytes_of_row - byte) / 2)) : 0);
  }
}

// By a group of warps.
template <int kBytes>
__device__ __forceinline__ void copy_bytes(uint32_t to, const uint8_t* from, int thread) {
#pragma unroll
  for (int i = thread; i < kBytes / 16; i += kGroupThreads) copy_async(to + i * 16, from + i * 16, true);
}

__device__ __forceinline__ void copy_prefix(uint32_t to, const uint8_t* from, int bytes, int thread) {
  for (int i = thread; i < bytes / 16; i += kGroupThreads) copy_async(to + i * 16, from + i * 16, true);
}

// Whose part of a tile a thread copies: that of `thread` of tile `tile`.
struct TilePlace {
  int64_t tile;
  int thread;
};

// What a group of warps copies for one of its chunks.
template <class V>
struct Copier {
  using Format = typename V::Format;
  const Params& p;
  uint32_t ring;  // of the group
  int tile, first_token, thread;

  __device__ __forceinline__ uint32_t stage(int slot) const { return ring + slot * V::kStageBytes; }
  __device__ __forceinline__ void copy_weights(int chunk, int slot) const {
    const uint32_t to = stage(slot) + V::kTokenBytes;
    if constexpr (Format::kPacked) {
      constexpr int kOfTile = kTileInputs / Format::kChunk;  // chunks
      const int tiles = (p.chunks + kOfTile - 1) / kOfTile;
      const int64_t number = (int64_t(tile / 2) * tiles + chunk / kOfTile) * 2 + tile % 2;
      if constexpr (kOfTile > 1) {
        const TilePlace own{number, thread};
        Format::copy_part(to, p.weights, p.more, own, own, chunk % kOfTile, thread);
      } else {
        if constexpr (Format::kPrefix) copy_planes(to, number);
        else copy_bytes<Format::kTileBytes>(to, p.weights + number * Format::kTileBytes, thread);
        if constexpr (Format::kMoreBytes > 0)
          copy_bytes<Format::kMoreBytes>(to + Format::kTileBytes, p.more + number * Format::kMoreBytes, thread);
      }
    } else {
      copy_rows<kTileOutputs, 128>(to, p.weights, int64_t(tile) * kTileOutputs, p.out_features, int64_t(chunk) * 128,
                                   int64_t(p.in_features) * 2, p.aligned, thread);
    }
  }
  __device__ __forceinline__ void copy_planes(uint32_t to, int64_t number) const {
    int bytes = Format::bytes_read(p);
    if constexpr (Format::kApart) {
      bytes -= p.num_apart * kPlaneBytes;
      for (int i = 0; i < p.num_apart; ++i)
        copy_prefix(to + bytes + i * kPlaneBytes, p.apart[i] + number * kPlaneBytes, kPlaneBytes, thread);
    }
    copy_prefix(to, p.weights + number * p.tile_stride, bytes, thread);
  }
  __device__ __forceinline__ void begin_tokens() const { wait_for_previous_kernel(); }  // which may have written x
  // Chunks of a weight with outliers beyond those of x meet the tokens of its last.
  __device__ __forceinline__ void copy_tokens(int weight_chunk, int slot) const {
    const int chunk = min(weight_chunk, p.token_chunks - 1);
    copy_rows<V::kTokens, V::kRowBytes>(stage(slot), p.x, first_token, p.num_tokens, int64_t(chunk) * V::kRowBytes,
                                        int64_t(p.in_features) * Format::kActivationBits / 8, p.aligned, thread);
    if constexpr (V::kScaleBytes > 0) {
      constexpr int kPieces = V::kTokens / 4;
      const uint32_t to = stage(slot) + V::kTokenBytes + V::kTileBytes;
      for (int i = thread; i < Format::kGroups * kPieces; i += kGroupThreads) {
        const int token = first_token + i % kPieces * 4;
        const bool inside = token < p.x_scale_stride;
        const int64_t from = (int64_t(chunk) * Format::kGroups + i / kPieces) * p.x_scale_stride + (inside ? token : 0);
        copy_async(to + i * 16, p.x_scales + from, inside);
      }
    }
  }
};

}  // namespace mlspec::portable
