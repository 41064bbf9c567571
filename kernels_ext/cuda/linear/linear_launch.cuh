// Which grid, cluster and ring does a linear of these shapes get, and how is it launched?
#pragma once

#include "linear.h"
#include "linear_tile.cuh"
#include "../tensor_map.cuh"

namespace mlspec {

constexpr int kMultiprocessors = 132;  // of an H100 and H200: a constant, so that bits do not depend on the chip
constexpr int kSharedMemory = 228 * 1024, kSystemMemory = 1024;  // of a multiprocessor, of a block
constexpr int kMostRanks = 8;

// How many blocks share the inputs of a tile, each at least 4 chunks. Two blocks fit a multiprocessor; clusters of 4 and 8
// do not fill the chip (a cluster lies within a group of multiprocessors), and a second wave doubles the time. Where 2 leave
// half of the places empty, weights of few bits, whose warps have more to do for a byte, take 3. chunks: of 128 inputs.
inline int ranks_of_shape(int output_tiles, int chunks, bool few_bits) {
  for (const int ranks : {8, 4})
    if (output_tiles * ranks <= kMultiprocessors - 4 && chunks >= ranks * 4) return ranks;
  if (few_bits && output_tiles * 2 <= kMultiprocessors && chunks >= 3 * 4) return 3;
  return output_tiles * 2 <= 2 * kMultiprocessors && chunks >= 2 * 4 ? 2 : 1;
}

// Whole turns of all groups of warps: a stage belongs to one group, which waits for each of its fillings and so never
// mistakes one for another, and the stages of a turn are filled in the same round of the ring.
constexpr int stages_of_ring(int ring_bytes, int stage_bytes, int turn, int most) {
  const int stages = ring_bytes / stage_bytes / turn * turn;
  return stages < most ? stages : most;
}

// Bytes of a block's shared memory, beside barriers and tables.
template <class V>
struct Room {
  static constexpr int kTurnStages = V::kTurn * V::kWarpGroups;

  // Sums that do not lie over the ring.
  constexpr int own_sums(int ranks) const {
    if (!V::kOwnSums) return 0;
    return V::kSumBytes + (ranks > 1 ? (ranks - 1) * V::quads_of_rank(ranks) * 16 : 0);
  }
  constexpr int ring(int ranks) const {
    return kSharedMemory / V::kBlocks - kSystemMemory - V::kFrontBytes - own_sums(ranks);
  }
  // Whatever the shape: ranks alone changes what is left.
  constexpr bool for_any_ranks() const {
    for (int ranks = 1; ranks <= kMostRanks; ++ranks)
      if (stages_of_ring(ring(ranks), V::kStageBytes, kTurnStages, V::kMostStages) < kTurnStages) return false;
    const int all = kSharedMemory / V::kBlocks - kSystemMemory;
    return V::kOwnSums || V::kSumBytes + V::kFrontBytes <= all;
  }
};

// Boxes of 128 bytes x `box_rows` rows of a matrix of `bytes` an element; zeros beyond its edges.
inline const char* describe(CUtensorMap* map, const void* matrix, int64_t rows, int64_t columns, int bytes, int box_rows) {
  const auto encode = tensor_map_encoder();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled: CUDA 12.0 or later is needed";
  const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)}, row_bytes[1] = {cuuint64_t(columns * bytes)};
  const cuuint32_t box[2] = {cuuint32_t(128 / bytes), cuuint32_t(box_rows)}, steps[2] = {1, 1};
  const CUresult result = encode(
      map, bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix), sizes,
      row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "x or the weight cannot be described to the copy engine: align rows to 16 bytes";
}

// Of x; the weight's, but for the outliers that it has twice.
inline int64_t inputs_of(const mlspec_cuda_linear& a) { return a.in_features - a.outliers; }

template <class V>
const char* describe_operands(Maps* maps, const mlspec_cuda_linear& a) {
  constexpr int kBytes = V::Format::kActivationBits / 8;
  if (const char* problem = describe(&maps->x, a.x, a.num_tokens, inputs_of(a), kBytes, V::kBoxTokens)) return problem;
  if constexpr (!V::Format::kPacked) return describe(&maps->weight, a.tiles, a.out_features, a.in_features, 2, V::kOutputs);
  return nullptr;
}

inline const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

inline int blocks_of(int64_t size, int block) { return int((size + block - 1) / block); }

// What the kernel is told, but for the ring.
template <class V>
LinearParams params_of(const mlspec_cuda_linear& a) {
  LinearParams p = {};
  p.tiles = static_cast<const uint8_t*>(a.tiles), p.more = static_cast<const uint8_t*>(a.more);
  p.codebook = static_cast<const uint8_t*>(a.codebook), p.tile_stride = a.tile_stride, p.zero_doubled = a.zero_doubled;
  p.absent_planes = a.absent_planes, p.num_apart = a.num_apart;
  for (int i = 0; i < a.num_apart; ++i) p.apart[i] = static_cast<const uint8_t*>(a.apart[i]);
  p.tables = static_cast<const half*>(a.tables), p.table_columns = a.table_columns;
  p.x = static_cast<const uint8_t*>(a.x), p.x_scales = a.x_scales;
  p.bias = a.bias, p.x_row_bytes = int(inputs_of(a) * V::Format::kActivationBits / 8);
  p.token_chunks = blocks_of(inputs_of(a), V::Format::kChunk);
  p.exponent_shift = a.exponent_shift, p.out = a.out, p.out_is_float32 = a.out_is_float32 != 0;
  p.num_tokens = int(a.num_tokens), p.out_features = int(a.out_features), p.x_scale_stride = int(a.x_scale_stride);
  p.chunks = blocks_of(a.in_features, V::Format::kChunk), p.token_blocks = blocks_of(a.num_tokens, V::kTokens);
  p.units = p.token_blocks * blocks_of(a.out_features, V::kOutputs);
  p.bias_is_float32 = a.bias_is_float32 != 0;
  p.between = a.between, p.up = a.up, p.first = a.first, p.low_ranks = int(a.low_ranks), p.low_rank = int(a.low_rank);
  return p;
}

// Clusters for the units. Where nothing is shared and whole turns of the ring make a unit, as many as run at once: they take
// one unit after another without an empty ring between.
template <class V>
int clusters_of(const LinearParams& p, int ranks) {
  constexpr int kPlaces = kMultiprocessors * V::kBlocks;
  const bool runs_on = V::kOwnSums && ranks == 1 && p.chunks % (V::kTurn * V::kWarpGroups) == 0;
  return runs_on && p.units > kPlaces ? kPlaces : p.units;
}

// How many blocks share a tile of this weight.
inline int ranks_of_weight(const mlspec_cuda_linear& a, bool few_bits) {
  if (a.ranks) return a.ranks;
  return ranks_of_shape(blocks_of(a.outputs_of_weight ? a.outputs_of_weight : a.out_features, kTileOutputs),
                        blocks_of(a.in_features, kTileInputs), few_bits);
}

// What the kernel is told, and the bytes of shared memory that it needs, 0: the ring is smaller than a turn.
// copies_tokens: the threads that multiply copy the first tokens (of the variants that can), else the copy engine does.
template <class V>
int plan(LinearParams* params, const mlspec_cuda_linear& a, bool copies_tokens) {
  *params = params_of<V>(a);
  const int ranks = params->ranks = ranks_of_weight(a, V::kWarpGroups == 2);
  constexpr Room<V> kRoom;
  static_assert(kRoom.for_any_ranks(), "a cluster's sums leave no room for one turn: give the format a smaller kTurn");
  const int own_sums = kRoom.own_sums(ranks), other_sums = V::kOwnSums ? 0 : V::kSumBytes, room = kRoom.ring(ranks);
  const int ring = a.ring_bytes ? a.ring_bytes : room;
  params->stages = stages_of_ring(ring, V::kStageBytes, kRoom.kTurnStages, V::kMostStages);
  params->copies_tokens = copies_tokens;
  params->stages_ahead = a.stages_ahead ? a.stages_ahead : V::kAhead;
  if (params->stages_ahead > params->stages) params->stages_ahead = params->stages;
  if (params->stages == 0) return 0;
  const int stage_bytes = params->stages * V::kStageBytes;
  const int needed = (stage_bytes > other_sums ? stage_bytes : other_sums) + own_sums + V::kFrontBytes;
  // More than kBlocks would fit a multiprocessor with small stages, and leave others idle.
  return needed > kSharedMemory / (V::kBlocks + 1) ? needed : kSharedMemory / (V::kBlocks + 1);
}

// blocks: of the grid, whole clusters of `ranks`.
template <class... Parameters, class... Arguments>
const char* launch_blocks(const mlspec_cuda_linear& a, int blocks, int ranks, int threads, int shared,
                          void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (const char* problem = message(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)))
    return problem;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {unsigned(ranks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(a.stream);
  config.attrs = attributes;
  config.numAttrs = a.overlap ? 2 : 1;
  return message(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class V>
const char* launch(const mlspec_cuda_linear& a, bool copies_tokens = true) {
  LinearParams params;
  const int shared = plan<V>(&params, a, copies_tokens), ranks = params.ranks;
  if (shared == 0) return "the ring is smaller than one turn of all groups of warps";
  Maps maps = {};
  if (const char* problem = describe_operands<V>(&maps, a)) return problem;
  return launch_blocks(a, ranks * clusters_of<V>(params, ranks), ranks, V::kThreads, shared, linear_kernel<V>, maps, params);
}

// Variants as 100 * tokens / 8 + 10 * output tiles + engine (1 mma, 2 wgmma, 3 mma and all tokens by the copy engine); the
// fastest measured on an H200, 8192 x 8192.
template <class Format>
const char* launch_codes(const mlspec_cuda_linear& a) {
  constexpr bool kInteger = Format::kActivationBits == 8;
  constexpr int kTo16 = kInteger ? 212 : 211;
  const int64_t tokens = a.num_tokens;
  switch (a.variant ? a.variant : tokens <= 8 ? 111 : tokens <= 16 ? kTo16 : tokens <= 32 ? 412 : 822) {
    case 111: return launch<Variant<Format, 1, 1, false>>(a);
    case 113: return launch<Variant<Format, 1, 1, false>>(a, false);
    case kTo16: return launch<Variant<Format, 2, 1, kInteger>>(a);
    case 412: return launch<Variant<Format, 4, 1, true>>(a);
    case 822: return launch<Variant<Format, 8, 2, true>>(a);
    default: return "no such variant of the kernel";
  }
}

inline const char* problem_of(const mlspec_cuda_linear& a, int multiple) {
  if (a.num_tokens < 1 || a.out_features < 1) return "num_tokens and out_features must be at least 1";
  if (a.in_features < multiple || a.in_features % multiple)
    return multiple == 8 ? "in_features must be a multiple of 8: pad x and the weight"
                         : "in_features must be a multiple of 32: pad x and the weight";
  if (a.ranks < 0 || a.ranks > kMostRanks) return "ranks must be 1 to 8";
  if (a.activation_bits != 16 && a.activation_bits != 8 && a.activation_bits != 4) return "activation_bits must be 16, 8 or 4";
  if (a.activation_bits != 16 && (!a.x_scales || a.x_scale_stride % 4 || a.x_scale_stride < a.num_tokens))
    return "integer activations need x_scales whose stride is a multiple of 4 and at least num_tokens";
  return nullptr;
}

}  // namespace mlspec
