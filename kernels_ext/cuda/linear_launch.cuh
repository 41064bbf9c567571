// Which grid, cluster and ring does a linear of these shapes get, and how is it launched?
#pragma once

#include <cudaTypedefs.h>

#include "linear.h"
#include "linear_tile.cuh"

namespace mlspec {

constexpr int kMultiprocessors = 132;  // of an H100 and H200: a constant, so that bits do not depend on the chip
constexpr int kSharedMemory = 227 * 1024, kReserved = 3072;  // of a multiprocessor; of a block beside its ring

// How many blocks share the inputs of a tile, each at least 4 chunks. Two blocks fit a multiprocessor; clusters of 4 and 8
// do not fill the chip (a cluster lies within a group of multiprocessors), and a second wave doubles the time. Where 2 leave
// half of the places empty, 4-bit weights, whose warps have more to do for a byte, take 3.
inline int ranks_of_shape(int output_tiles, int chunks, bool four_bits) {
  for (const int ranks : {8, 4})
    if (output_tiles * ranks <= kMultiprocessors - 4 && chunks >= ranks * 4) return ranks;
  if (four_bits && output_tiles * 2 <= kMultiprocessors && chunks >= 3 * 4) return 3;
  return output_tiles * 2 <= 2 * kMultiprocessors && chunks >= 2 * 4 ? 2 : 1;
}

// Even: a stage belongs to one group of warps, which waits for each of its fillings and so never mistakes one for another.
// Whole turns: the stages of a turn are filled in the same round of the ring.
inline int stages_of_ring(int ring_bytes, int stage_bytes, int turn) {
  const int multiple = turn * kGroups, stages = ring_bytes / stage_bytes / multiple * multiple;
  return stages < kMaxStages ? stages : kMaxStages;
}

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found == cudaDriverEntryPointSuccess ? function : nullptr);
  }();
  return encoder;
}

// Boxes of 128 bytes x `tokens` rows of x.
template <class Format>
const char* describe_tokens(CUtensorMap* map, const mlspec_cuda_linear& a, int tokens) {
  constexpr int kBytes = Format::kActivationBits / 8;
  const auto encode = tensor_map_encoder();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled: CUDA 12.0 or later is needed";
  const cuuint64_t sizes[2] = {cuuint64_t(a.in_features), cuuint64_t(a.num_tokens)};
  const cuuint64_t row_bytes[1] = {cuuint64_t(a.in_features * kBytes)};
  const cuuint32_t box[2] = {128 / kBytes, cuuint32_t(tokens)}, steps[2] = {1, 1};
  const CUresult result = encode(
      map, kBytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(a.x), sizes,
      row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "x cannot be described to the copy engine: rows must be aligned to 16 bytes";
}

inline const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

template <class V>
const char* launch(const mlspec_cuda_linear& a) {
  const auto kernel = linear_kernel<V>;
  const int chunks = int((a.in_features + kTileInputs - 1) / kTileInputs);
  const int output_blocks = int((a.out_features + V::kOutputs - 1) / V::kOutputs);
  const int token_blocks = int((a.num_tokens + V::kTokens - 1) / V::kTokens);
  const int ranks = a.ranks ? a.ranks : ranks_of_shape(int((a.out_features + kTileOutputs - 1) / kTileOutputs), chunks, V::Format::kFourBits);
  const int ring = a.ring_bytes ? a.ring_bytes : kSharedMemory / V::kBlocks - kReserved;
  const int stages = stages_of_ring(ring, V::kStageBytes, V::kTurn);
  const int sums = V::kTokens * V::kSumStride * 4;
  const int shared = (stages * V::kStageBytes > sums ? stages * V::kStageBytes : sums) + 2048;
  if (stages < kGroups) return "the ring is smaller than one turn of both groups of warps";
  CUtensorMap x_map;
  if (const char* problem = describe_tokens<typename V::Format>(&x_map, a, V::kTokens)) return problem;
  const LinearParams params{static_cast<const uint8_t*>(a.tiles), a.x_scales, static_cast<const __nv_bfloat16*>(a.bias),
                            static_cast<__nv_bfloat16*>(a.out), int(a.num_tokens), int(a.out_features), chunks, token_blocks,
                            int(a.x_scale_stride), stages, a.stages_ahead ? a.stages_ahead : V::kTiles == 1 ? 4 : 2,
                            V::Format::kOutScale * exp2f(float(a.exponent_shift))};
  if (const char* problem = message(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)))
    return problem;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {unsigned(ranks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(ranks * token_blocks * output_blocks));
  config.blockDim = dim3(V::kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(a.stream);
  config.attrs = attributes;
  config.numAttrs = a.overlap ? 2 : 1;
  return message(cudaLaunchKernelEx(&config, kernel, x_map, params));
}

// Variants as 100 * tokens / 8 + 10 * output tiles + engine (1 mma, 2 wgmma).
template <class Format, bool kMostTokens>
const char* launch_variant(const mlspec_cuda_linear& a) {
  switch (a.variant) {
    case 111: return launch<Variant<Format, 1, 1, false>>(a);
    case 112: return launch<Variant<Format, 1, 1, true>>(a);
    case 211: return launch<Variant<Format, 2, 1, false>>(a);
    case 212: return launch<Variant<Format, 2, 1, true>>(a);
    case 412: return launch<Variant<Format, 4, 1, true>>(a);
    case 422: return launch<Variant<Format, 4, 2, true>>(a);
    case 812: return launch<Variant<Format, 8, 1, true>>(a);
    case 822: return launch<Variant<Format, 8, 2, true>>(a);
    case 1622:
      if constexpr (kMostTokens) return launch<Variant<Format, 16, 2, true>>(a);
    default: return "no such variant of the kernel";
  }
}

// The fastest measured on an H200, 8192 x 8192.
template <class Format>
int variant_of_tokens(int64_t tokens, bool most_tokens) {
  if (tokens <= 8) return 111;
  if (tokens <= 16) return Format::kFourBits && Format::kActivationBits == 16 ? 211 : 212;
  if (tokens <= 32) return 412;
  return tokens <= 64 || !most_tokens ? 822 : 1622;
}

inline const char* problem_of(const mlspec_cuda_linear& a, bool int8) {
  if (a.num_tokens < 1 || a.out_features < 1) return "num_tokens and out_features must be at least 1";
  if (a.in_features < 32 || a.in_features % 32) return "in_features must be a multiple of 32: pad x and the weight";
  if (a.ranks < 0 || a.ranks > 8) return "ranks must be 1 to 8";
  if (int8 && (!a.x_scales || a.x_scale_stride % 4 || a.x_scale_stride < a.num_tokens))
    return "int8 activations need x_scales whose stride is a multiple of 4 and at least num_tokens";
  return nullptr;
}

template <class Format, bool kMostTokens>
const char* launch_tokens(const mlspec_cuda_linear& a) {
  if (const char* problem = problem_of(a, Format::kActivationBits == 8)) return problem;
  mlspec_cuda_linear chosen = a;
  if (!a.variant) chosen.variant = variant_of_tokens<Format>(a.num_tokens, kMostTokens);
  return launch_variant<Format, kMostTokens>(chosen);
}

}  // namespace mlspec
