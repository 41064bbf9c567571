// How does a block multiply 64 outputs of one expert with some of its tokens? As the kernel for every GPU does with any tokens
// (portable_linear.cuh), in its order of sums; only where rows come from and where they go is read from the plan of the routing.
#pragma once

#include "../portable/portable_linear.cuh"
#include "../rows/activation.cuh"
#include "experts.h"

namespace mlspec::portable {

// Stages of a block of 8 tokens. Up to two blocks for each multiprocessor of Hopper have deep rings, which hold most of a block's weights
// at once; of more blocks four share a multiprocessor where weights have 4 bits, three where they have 16.
constexpr int kFewBlocks = 2 * 132, kDeepStages = 7, kManyStages = 4;
constexpr int kPairBytes = 2 * 64 * int(sizeof(int));  // in shared memory: pairs of an item, and their tokens

struct ExpertParams {
  Params p;  // of one expert; num_tokens: pairs
  const int32_t* plan;
  int pairs_of_token, most_items;
  int64_t bytes_of_expert, more_of_expert, shifts_of_expert;
  float slope, limit;  // limit above 0: outputs are gate and up in turns, and gated
  int activation;      // 0 or above: gate comes before up, and outputs are gated
};

constexpr int kHalf = kTileOutputs / 2;  // outputs of a tile that a block may take without the others

// Tiles of 8 tokens that a block multiplies at most: an item of 64 rows is that of several blocks where stages leave no room for all.
template <class Format>
constexpr int kMostTokenTiles = 8;

// Whether a format reads more of an expert than its tiles: what Params points to is then the expert's own.
template <class Format>
constexpr bool kReadsMore = false;

template <class Format>
using ParamsOf = std::conditional_t<kReadsMore<Format>, Params, const Params&>;

template <class Format>
__device__ __forceinline__ ParamsOf<Format> params_of(const ExpertParams& e, int expert) {
  if constexpr (!kReadsMore<Format>) {
    return e.p;
  } else {
    Params own = e.p;
    own.exponent_shift += expert * e.shifts_of_expert;
    own.codebook += expert * kCodebookLevels;
    if constexpr (Format::kMoreBytes > 0) own.more += expert * e.more_of_expert;
    return own;
  }
}

// Two gated outputs of four; what they are made of is rounded first, as where a kernel of its own reads it.
__device__ __forceinline__ void store_pairs(const ExpertParams& e, const void* bias, float4 sum, float out_scale, int pair, int output) {
  float values[4];
  __nv_bfloat16 rounded[4];
  finish_sums(e.p, bias, sum, out_scale, output, values, rounded);
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(e.p.out) + (int64_t(pair) * e.p.out_features + output) / 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2)
    if (output + i < e.p.out_features)
      out[i / 2] = __float2bfloat16_rn(gated_pair(__bfloat162float(rounded[i]), __bfloat162float(rounded[i + 1]), e.slope, e.limit));
}

// Four outputs of gate and the four of up, at `output` of each; rounded first, as there.
__device__ __forceinline__ void store_gated(const ExpertParams& e, const void* bias, const float4 (&sums)[2], float out_scale, int pair,
                                            int output) {
  const int width = e.p.out_features / 2;
  float values[4];
  __nv_bfloat16 gate[4], up[4];
  finish_sums(e.p, bias, sums[0], out_scale, output, values, gate);
  finish_sums(e.p, bias, sums[1], out_scale, width + output, values, up);
  __nv_bfloat16 rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    rounded[i] = __float2bfloat16_rn(activated(e.activation, __bfloat162float(gate[i])) * __bfloat162float(up[i]));
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(e.p.out) + int64_t(pair) * width + output;
  *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(rounded);
}

// Token rows are those that `tokens`, in shared memory, names: the last ones of an item that is not full are one token again.
template <class V>
struct ExpertCopier {
  using Format = typename V::Format;
  const ParamsOf<Format> p;
  const uint8_t* weights;
  const int32_t* places;  // in the plan: the item's pairs
  int rows, pairs_of_token;
  int *pairs, *tokens;
  uint32_t ring;  // of the group
  int halves[2];  // of tiles, that the block multiplies: of one tile, or of gate and of up
  int thread;

  __device__ __forceinline__ uint32_t stage(int slot) const { return ring + slot * V::kStageBytes; }
  __device__ __forceinline__ void copy_weights(int chunk, int slot) const {
    const uint32_t to = stage(slot) + V::kTokenBytes;
    if constexpr (Format::kPacked) {
      constexpr int kOfTile = kTileInputs / Format::kChunk;  // chunks
      const int tiles = (p.chunks + kOfTile - 1) / kOfTile;
      const auto number = [&](int half) { return (int64_t(half / 4) * tiles + chunk / kOfTile) * 2 + half / 2 % 2; };
      if constexpr (kOfTile > 1) {
        const auto place = [&](int threads) {
          const int half = thread < threads / 2 ? halves[0] : halves[1];
          return TilePlace{number(half), thread % (threads / 2) + half % 2 * (threads / 2)};
        };
        Format::copy_part(to, weights, p.more, place(kGroupThreads), place(32), chunk % kOfTile, thread);
      } else if constexpr (Format::kPrefix) {
        const uint8_t* const from[2] = {weights + number(halves[0]) * p.tile_stride, weights + number(halves[1]) * p.tile_stride};
        copy_halves<Format::kScaleBytes>(to, from, 0);
        for (int plane = 0; plane < p.num_planes; ++plane)
          copy_halves<kPlaneBytes>(to, from, Format::kScaleBytes + plane * kPlaneBytes);
      } else {
        constexpr int kScaled = Format::kTileBytes - kCodeBytes, kZeros = Format::kHasZeros ? kScaled / 3 : 0;
        const uint8_t* const from[2] = {weights + number(halves[0]) * Format::kTileBytes,
                                        weights + number(halves[1]) * Format::kTileBytes};
        copy_halves<kCodeBytes>(to, from, 0);
        copy_halves<kScaled - kZeros>(to, from, kCodeBytes);
        if constexpr (kZeros > 0) copy_halves<kZeros>(to, from, Format::kTileBytes - kZeros);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        copy_rows<kHalf, 128>(to + i * kHalf * 128, weights, int64_t(halves[i]) * kHalf, p.out_features, int64_t(chunk) * 128,
                              int64_t(p.in_features) * 2, p.aligned, thread);
    }
  }
  // Of kBytes from `start` on in both tiles, whose first half belongs to the first half of their outputs.
  template <int kBytes>
  __device__ __forceinline__ void copy_halves(uint32_t to, const uint8_t* const (&from)[2], int start) const {
    constexpr int kPieces = kBytes / 32;  // of a half
#pragma unroll
    for (int i = thread; i < 2 * kPieces; i += kGroupThreads) {
      const bool first = i < kPieces;  // no index: arrays stay in registers
      const uint8_t* const tile = first ? from[0] : from[1];
      copy_async(to + start + i * 16, tile + start + (i % kPieces + (first ? halves[0] : halves[1]) % 2 * kPieces) * 16, true);
    }
  }
  // Behind the first weights, whose way is longer, and which no kernel in front writes.
  __device__ __forceinline__ void begin_tokens() const {
    wait_for_previous_kernel();
    if (threadIdx.x < V::kTokens) {
      const int pair = places[min(int(threadIdx.x), rows - 1)];
      pairs[threadIdx.x] = pair, tokens[threadIdx.x] = pair / pairs_of_token;
    }
    __syncthreads();
  }
  __device__ __forceinline__ void copy_tokens(int chunk, int slot) const {
    constexpr int kPieces = V::kRowBytes / 16;
    const int64_t bytes_of_row = int64_t(p.in_features) * Format::kActivationBits / 8;
#pragma unroll
    for (int i = thread; i < V::kTokens * kPieces; i += kGroupThreads) {
      const int row = i / kPieces, piece = i % kPieces;
      const int64_t byte = int64_t(chunk) * V::kRowBytes + piece * 16;
      const uint32_t place = stage(slot) + piece / 8 * (V::kTokens * 128) + row * 128 + ((piece % 8 ^ row % 8) << 4);
      const bool inside = byte < bytes_of_row;
      const uint8_t* from = inside ? p.x + tokens[row] * bytes_of_row + byte : p.x;
      if (p.aligned) copy_async(place, from, inside);
      else copy_unaligned(place, reinterpret_cast<const uint16_t*>(from), inside ? int(min(int64_t(8), (bytes_of_row - byte) / 2)) : 0);
    }
    if constexpr (V::kScaleBytes > 0) {
      const uint32_t to = stage(slot) + V::kTokenBytes + V::kTileBytes;
      for (int i = thread; i < Format::kGroups * V::kTokens; i += kGroupThreads) {
        const int64_t group = int64_t(chunk) * Format::kGroups + i / V::kTokens;
        copy_4(to + i * 4, p.x_scales + group * p.x_scale_stride + tokens[i % V::kTokens]);
      }
    }
  }
};

// Grid: items of the plan x tiles of outputs, in this order along x: items of one expert, which run together, share its weights in
// the L2 cache. As many items as there may be; a block of one that is not used ends at once.
template <class V>
__global__ void __launch_bounds__(kThreads) expert_kernel(const __grid_constant__ ExpertParams e) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ int pairs[V::kTokens], tokens[V::kTokens];
  static_assert(V::kSharedBytes + sizeof(pairs) + sizeof(tokens) <= kRingBytes, "more than every GPU gives a block");
  launch_dependents();
  constexpr int kBlocks = V::kTokenTiles == kMostTokenTiles<typename V::Format> ? 8 / V::kTokenTiles : 1;  // of an item
  const int tile = blockIdx.x / (e.most_items * kBlocks), part = blockIdx.x % kBlocks;
  const int32_t* item = e.plan + e.p.num_tokens + 3 * (blockIdx.x / kBlocks % e.most_items);
  // Whole, as nobody starts before the kernel that wrote it has ended (route.cu): which weights are read is known before the inputs are.
  const int expert = __ldcg(item), first = __ldcg(item + 1) + part * V::kTokens;
  const int rows = kBlocks == 1 ? __ldcg(item + 2) : min(__ldcg(item + 2) - part * V::kTokens, V::kTokens);
  if (rows <= 0) {
    wait_for_previous_kernel();  // a grid without rows ends behind those in front of it, too
    return;
  }
  const ParamsOf<typename V::Format> p = params_of<typename V::Format>(e, expert);
  int shift = 0;
  if constexpr (V::Format::kHasShift) shift = e.p.exponent_shift[expert * e.shifts_of_expert];  // read while others wait
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, warp = thread / 32, lane = thread % 32;
  uint8_t* own = stages + group * V::kStages * V::kStageBytes;
  const bool gated = e.activation >= 0;
  const int first_half = gated ? tile : 2 * tile, second_half = gated ? tile + p.out_features / kTileOutputs : first_half + 1;
  float sums[V::kTokenTiles][4] = {};
  const ExpertCopier<V> copier{p, p.weights + expert * e.bytes_of_expert, e.plan + first, rows, e.pairs_of_token, pairs, tokens,
                               shared_address(own), {first_half, second_half}, thread};
  sum_chunks<V>(sums, copier, own, stages, group, warp, lane);
  float* total = reinterpret_cast<float*>(stages);
  add_groups<V>(sums, total, group, warp, lane);
  float out_scale = V::Format::kOutScale;
  if constexpr (V::Format::kHasShift) out_scale *= exp2f(float(shift));
  if constexpr (V::Format::kPrefix) out_scale *= V::Format::out_scale(e.p);
  const int64_t bias_bytes = int64_t(p.out_features) * (p.bias_is_float32 ? 4 : 2);
  const void* bias = p.bias ? static_cast<const uint8_t*>(p.bias) + expert * bias_bytes : nullptr;
  const auto sum_of = [&](int row, int output) { return *reinterpret_cast<const float4*>(total + row * V::kSumStride + output); };
  if (gated) {
    constexpr int kQuads = kHalf / 4;
    for (int i = threadIdx.x; i < rows * kQuads; i += kThreads) {
      const int row = i / kQuads, output = i % kQuads * 4;
      const float4 both[2] = {sum_of(row, output), sum_of(row, kHalf + output)};
      store_gated(e, bias, both, out_scale, pairs[row], tile * kHalf + output);
    }
    return;
  }
  constexpr int kQuads = kTileOutputs / 4;
  for (int i = threadIdx.x; i < rows * kQuads; i += kThreads) {
    const int row = i / kQuads, output = i % kQuads * 4;
    const float4 sum = sum_of(row, output);
    if (e.limit > 0.f) store_pairs(e, bias, sum, out_scale, pairs[row], tile * kTileOutputs + output);
    else store_outputs(p, bias, sum, out_scale, pairs[row], tile * kTileOutputs + output);
  }
}

// What a kernel of experts is given, or what is wrong with it.
template <class Format>
const char* params_of_experts(const mlspec_cuda_expert_linear& args, ExpertParams& params) {
  const mlspec_cuda_linear& a = args.linear;
  const int64_t chunks = (a.in_features + Format::kChunk - 1) / Format::kChunk;
  const bool aligned = a.in_features * Format::kActivationBits / 8 % 16 == 0 && is_aligned(a.x) && is_aligned(a.tiles) &&
                       args.bytes_of_expert % 16 == 0;
  if (Format::kMoreBytes > 0 && (!is_aligned(a.more) || args.more_of_expert % 16)) return "low tiles must start at a multiple of 16 bytes";
  if (Format::kPacked && !aligned) return "x and the tiles must start at a multiple of 16 bytes";
  params = {};
  Params& p = params.p;
  p.weights = static_cast<const uint8_t*>(a.tiles), p.x = static_cast<const uint8_t*>(a.x), p.x_scales = a.x_scales;
  p.more = static_cast<const uint8_t*>(a.more), p.codebook = static_cast<const uint8_t*>(a.codebook);
  p.exponent_shift = a.exponent_shift, p.out = a.out, p.x_scale_stride = a.x_scale_stride;
  p.bias = a.bias, p.bias_is_float32 = a.bias_is_float32 != 0;
  p.num_tokens = int(args.num_pairs), p.in_features = int(a.in_features), p.out_features = int(a.out_features);
  p.chunks = p.token_chunks = int(chunks), p.aligned = aligned;
  p.tile_stride = a.tile_stride, p.zero_doubled = a.zero_doubled, p.num_planes = a.num_planes;
  params.plan = args.plan, params.pairs_of_token = int(args.num_pairs / a.num_tokens);
  params.most_items = int(mlspec_cuda_most_items(args.num_pairs, args.num_experts));
  params.bytes_of_expert = args.bytes_of_expert, params.more_of_expert = args.more_of_expert;
  params.shifts_of_expert = args.shifts_of_expert;
  params.slope = args.slope, params.limit = args.limit, params.activation = args.activation;
  return nullptr;
}

template <class V>
const char* launch_experts(const mlspec_cuda_expert_linear& args) {
  using Format = typename V::Format;
  ExpertParams params;
  if (const char* problem = params_of_experts<Format>(args, params)) return problem;
  const int64_t tiles = (args.linear.out_features + kTileOutputs - 1) / kTileOutputs, items = params.most_items;
  const int64_t blocks = V::kTokenTiles == kMostTokenTiles<Format> ? 8 / V::kTokenTiles : 1;  // of an item
  if (tiles * items * blocks > INT32_MAX) return "too many tokens times outputs for one launch: call it for fewer tokens";
  return launch_blocks(expert_kernel<V>, tiles * items * blocks, V::kSharedBytes, args.linear, params);
}

template <class Format>
const char* launch_rows_of_experts(const mlspec_cuda_expert_linear& args) {
  const mlspec_cuda_linear& a = args.linear;
  if (a.num_tokens < 1 || a.out_features < 1 || a.in_features < 1 || args.num_pairs < 1 || args.num_pairs % a.num_tokens)
    return "experts take a token or more, inputs, outputs, and as many pairs of every token";
  if (args.activation >= 0 && (a.out_features % kTileOutputs || args.limit > 0))
    return "gate before up are multiples of 32 outputs each, and in turns they are not";
  if (args.limit > 0 && a.out_features % 2) return "gate and up come in turns: outputs are even in number";
  if (args.num_pairs > INT32_MAX / 4) return "too many tokens for one launch: call it for fewer tokens";
  if (Format::kPacked && a.in_features % 32) return "in_features must be a multiple of 32: pad x and the weight";
  switch (mlspec_cuda_rows_of_item(args.num_pairs, args.num_experts)) {
    case 8: {
      const int64_t tiles = (a.out_features + kTileOutputs - 1) / kTileOutputs;
      if (tiles * mlspec_cuda_most_items(args.num_pairs, args.num_experts) <= kFewBlocks)
        return launch_experts<Variant<Format, 1, kPairBytes, kDeepStages>>(args);
      return launch_experts<Variant<Format, 1, kPairBytes, kManyStages>>(args);
    }
    case 16: return launch_experts<Variant<Format, 2, kPairBytes>>(args);
    default: return launch_experts<Variant<Format, kMostTokenTiles<Format>, kPairBytes>>(args);
  }
}

}  // namespace mlspec::portable
