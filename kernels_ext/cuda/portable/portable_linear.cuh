// How does a block multiply 64 outputs with up to 64 tokens on any GPU since sm_80, the same bits for any number of tokens?
//
// Inputs are cut into chunks of 64 (bfloat16 weights) or 128 (4 bits), dealt alternately to two groups of four warps. A group
// sums its chunks in ascending order, the block adds group 0 + group 1: one order for every weight of a shape. A token is a
// column of operand B, and neither the number of columns nor their place changes what mma adds, nor in what order.
#pragma once

#include <type_traits>

#include "../linear/linear.h"
#include "../linear/linear_scaled.cuh"
#include "portable_ring.cuh"

namespace mlspec::portable {

// bfloat16 weights as nn.Linear has them: [out, in], a stage holds 64 rows of 128 bytes.
struct RowMajorWeights {
  static constexpr int kChunk = 64, kGroups = 0, kActivationBits = 16, kTileBytes = kTileOutputs * kChunk * 2, kMoreBytes = 0;
  static constexpr int kTableBytes = 0;
  static constexpr bool kPacked = false, kHasZeros = false, kHasShift = false, kPrefix = false, kTables = false;
  static constexpr float kOutScale = 1;

  uint32_t address;

  __device__ __forceinline__ void prepare(const Params&) {}
  __device__ __forceinline__ static LanePlace place(int warp, int lane) {
    const int row = lane % 16;
    return {uint32_t((warp * 16 + row) * 128 + ((lane / 16 ^ row % 8) << 4)), 0};
  }
  __device__ __forceinline__ void load(const uint8_t* tile, LanePlace place) { address = shared_address(tile) + place.weights; }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const { load_matrices(a, address ^ step * 32); }
};

// Operand B of one step (32 bytes of every token); where a block has 8 tokens one instruction brings two steps.
template <int kTokenTiles>
struct TokenFragments {
  static constexpr int kSteps = kTokenTiles == 1 ? 2 : 1;
  uint32_t b[kSteps][kTokenTiles][2];

  __device__ __forceinline__ static uint32_t place(int lane) {
    const int row = kTokenTiles == 1 ? lane % 8 : lane / 16 * 8 + lane % 8;
    const int piece = kTokenTiles == 1 ? lane / 8 : lane / 8 % 2;
    return row * 128 + ((piece ^ row % 8) << 4);
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
        load_matrices(v, address + t * 8 * 128);
        b[0][t][0] = v[0], b[0][t][1] = v[1], b[0][t + 1][0] = v[2], b[0][t + 1][1] = v[3];
      }
    }
  }
};

template <class V>
__device__ __forceinline__ void multiply(float (&sums)[V::kTokenTiles][4], const typename V::Format& format, uint32_t tokens,
                                         uint32_t place, const float* x_scales, int lane) {
  using Format = typename V::Format;
  constexpr bool kScaled = Format::kGroups > 0, kTokenSums = Format::kActivationBits == 8 && Format::kHasZeros;
  constexpr int kAllSteps = V::kRowBytes / 32, kGroups = kScaled ? Format::kGroups : 1, kOfGroup = kAllSteps / kGroups;
  constexpr int kLoaded = TokenFragments<V::kTokenTiles>::kSteps;
  const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
  TokenFragments<V::kTokenTiles> fragments;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    typename V::Dot dots[V::kTokenTiles][4] = {};
    int token_sums[V::kTokenTiles][4] = {};
#pragma unroll
    for (int step = g * kOfGroup; step < (g + 1) * kOfGroup; ++step) {
      if (step % kLoaded == 0) fragments.load(tokens, place, step);
      uint32_t a[4];
      format.fragment(a, step);
#pragma unroll
      for (int t = 0; t < V::kTokenTiles; ++t) {
        const uint32_t(&b)[2] = fragments.b[step % kLoaded][t];
        if constexpr (kScaled) mma(dots[t], a, b[0], b[1]);
        else mma(sums[t], a, b[0], b[1]);
        if constexpr (kTokenSums) mma(token_sums[t], ones, b[0], b[1]);
      }
    }
    if constexpr (kScaled) add_scaled<V>(sums, dots, format, x_scales, token_sums, g, lane);
  }
}

// The chunks of a group, in ascending order.
template <class V, class Copies>
__device__ __forceinline__ void sum_chunks(float (&sums)[V::kTokenTiles][4], const Copies& copier, const uint8_t* stages,
                                           const uint8_t* tables, int group, int warp, int lane) {
  using Format = typename V::Format;
  const int chunks = (copier.p.chunks - group + kGroupsOfWarps - 1) / kGroupsOfWarps;
  const auto chunk = [&](int i) { return i * kGroupsOfWarps + group; };
  Format format;
  format.prepare(copier.p);
  if constexpr (Format::kTables) format.begin(tables, warp, lane);
#pragma unroll
  for (int i = 0; i < V::kStages - 1; ++i)
    if (i < chunks) copier.copy_weights(chunk(i), i);
  copier.begin_tokens();
#pragma unroll
  for (int i = 0; i < V::kStages - 1; ++i) {
    if (i < chunks) copier.copy_tokens(chunk(i), i);
    commit_copies();
  }
  const uint32_t place = TokenFragments<V::kTokenTiles>::place(lane);
  const LanePlace lane_place = Format::place(warp, lane);
  int slot = 0, next_slot = V::kStages - 1;
  for (int i = 0; i < chunks; ++i) {
    wait_for_copies<V::kStages - 2>();
    sync_group(group);  // the stage has arrived for all, and the one before it is read
    if (i + V::kStages - 1 < chunks) {
      copier.copy_weights(chunk(i + V::kStages - 1), next_slot);
      copier.copy_tokens(chunk(i + V::kStages - 1), next_slot);
    }
    commit_copies();
    const uint8_t* stage = stages + slot * V::kStageBytes;
    if constexpr (Format::kMoreBytes > 0)
      format.load(stage + V::kTokenBytes, stage + V::kTokenBytes + Format::kTileBytes, lane_place);
    else
      format.load(stage + V::kTokenBytes, lane_place);
    const float* x_scales = reinterpret_cast<const float*>(stage + V::kTokenBytes + V::kTileBytes);
    multiply<V>(sums, format, shared_address(stage), place, x_scales, lane);
    slot = slot + 1 == V::kStages ? 0 : slot + 1;
    next_slot = next_slot + 1 == V::kStages ? 0 : next_slot + 1;
  }
  wait_for_copies<0>();
}

// Of four outputs from `output` on what is stored; bias: of all outputs, or null.
__device__ __forceinline__ void finish_sums(const Params& p, const void* bias, float4 sum, float out_scale, int output,
                                            float (&values)[4], __nv_bfloat16 (&rounded)[4]) {
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = __fmul_rn(sums[i], out_scale);
    if (bias && output + i < p.out_features) {
      const float own = p.bias_is_float32 ? static_cast<const float*>(bias)[output + i]
                                          : __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[output + i]);
      values[i] = __fadd_rn(values[i], own);
    }
    rounded[i] = __float2bfloat16_rn(values[i]);
  }
}

__device__ __forceinline__ void store_outputs(const Params& p, const void* bias, float4 sum, float out_scale, int token, int output) {
  float values[4];
  __nv_bfloat16 rounded[4];
  finish_sums(p, bias, sum, out_scale, output, values, rounded);
  const int64_t place = int64_t(token) * p.out_features + output;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) + place;
  if (p.out_is_float32) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (output + i < p.out_features) static_cast<float*>(p.out)[place + i] = values[i];
    return;
  }
  if (p.out_features % 4 == 0) {
    if (output < p.out_features) *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(rounded);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (output + i < p.out_features) out[i] = rounded[i];
}

// Group 0 + group 1 in shared memory, [token, output].
template <class V>
__device__ __forceinline__ void add_groups(const float (&sums)[V::kTokenTiles][4], float* total, int group, int warp, int lane) {
  for (int turn = kGroupsOfWarps - 1; turn >= 0; --turn) {
    __syncthreads();
    if (group != turn) continue;
#pragma unroll
    for (int t = 0; t < V::kTokenTiles; ++t) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float& place = total[(t * 8 + lane % 4 * 2 + c % 2) * V::kSumStride + warp * 16 + lane / 4 + c / 2 * 8];
        place = turn == kGroupsOfWarps - 1 ? sums[t][c] : __fadd_rn(sums[t][c], place);
      }
    }
  }
  __syncthreads();
}

// Then all threads store.
template <class V>
__device__ __forceinline__ void finish(const Params& p, const float (&sums)[V::kTokenTiles][4], float* total, int first_token,
                                       int first_output, int group, int warp, int lane) {
  add_groups<V>(sums, total, group, warp, lane);
  float out_scale = V::Format::kOutScale;
  if constexpr (V::Format::kHasShift) out_scale *= exp2f(float(*p.exponent_shift));
  if constexpr (V::Format::kPrefix) out_scale *= V::Format::out_scale(p);
  constexpr int kQuads = kTileOutputs / 4;
  const int tokens = min(V::kTokens, p.num_tokens - first_token);
  for (int i = threadIdx.x; i < tokens * kQuads; i += kThreads) {
    const int token = i / kQuads, output = i % kQuads * 4;
    const float4 sum = *reinterpret_cast<const float4*>(total + token * V::kSumStride + output);
    store_outputs(p, p.bias, sum, out_scale, first_token + token, first_output + output);
  }
}

// Grid: blocks of tokens x tiles of outputs, in this order along x: those that run together share weights in the L2 cache.
template <class V>
__global__ void __launch_bounds__(kThreads) linear_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t stages[];
  launch_dependents();
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, warp = thread / 32, lane = thread % 32;
  const int tile = blockIdx.x / p.token_blocks, first_token = blockIdx.x % p.token_blocks * V::kTokens;
  uint8_t* own = stages + group * V::kStages * V::kStageBytes;
  float sums[V::kTokenTiles][4] = {};
  const Copier<V> copier{p, shared_address(own), tile, first_token, thread};
  uint8_t* tables = stages + V::kRingsBytes;
  if constexpr (V::Format::kTables) V::Format::fill_tables(p, tables, tile);
  sum_chunks<V>(sums, copier, own, tables, group, warp, lane);
  finish<V>(p, sums, reinterpret_cast<float*>(stages), first_token, tile * kTileOutputs, group, warp, lane);
}

inline const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// So many blocks of a kernel that takes `params`, where and as `a` says.
template <class ParamsOf>
const char* launch_blocks(void (*kernel)(ParamsOf), int64_t blocks, int shared_bytes, const mlspec_cuda_linear& a,
                          const std::remove_const_t<ParamsOf>& params) {
  if (const char* problem = message(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)))
    return problem;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(a.stream);
  config.attrs = &attribute;
  config.numAttrs = a.overlap ? 1 : 0;
  return message(cudaLaunchKernelEx(&config, kernel, params));
}

template <class V>
const char* launch(const mlspec_cuda_linear& a) {
  using Format = typename V::Format;
  const int64_t chunks = (a.in_features + Format::kChunk - 1) / Format::kChunk;
  const int64_t tiles = (a.out_features + kTileOutputs - 1) / kTileOutputs;
  const int64_t token_blocks = (a.num_tokens + V::kTokens - 1) / V::kTokens;
  const int64_t inputs = a.in_features - a.outliers, token_chunks = (inputs + Format::kChunk - 1) / Format::kChunk;
  const int64_t row_bytes = inputs * Format::kActivationBits / 8;
  const bool aligned = row_bytes % 16 == 0 && is_aligned(a.x) && is_aligned(a.tiles) && is_aligned(a.more);
  if (Format::kPacked && !aligned) return "x and the tiles must start at a multiple of 16 bytes";
  if (tiles * token_blocks > INT32_MAX) return "too many tokens times outputs for one launch: call it for fewer tokens";
  const auto bytes = [](const void* pointer) { return static_cast<const uint8_t*>(pointer); };
  Params params{bytes(a.tiles), bytes(a.more), bytes(a.x), a.x_scales, a.bias, a.exponent_shift, bytes(a.codebook),
                      static_cast<const half*>(a.tables), a.out, a.x_scale_stride, int(a.num_tokens),
                      int(inputs), int(a.out_features), int(chunks), int(token_chunks), int(token_blocks), a.tile_stride,
                      a.zero_doubled, a.num_planes, a.table_columns, a.absent_planes, a.num_apart, {}, aligned, a.bias_is_float32 != 0, a.out_is_float32 != 0};
  for (int i = 0; i < a.num_apart; ++i) params.apart[i] = bytes(a.apart[i]);
  return launch_blocks(linear_kernel<V>, tiles * token_blocks, V::kSharedBytes, a, params);
}

// kMostTokenTiles: of a block; stages that hold more than 4 bits of a weight leave room for 4 alone.
template <class Format, int kMostTokenTiles = 8>
const char* launch_tokens(const mlspec_cuda_linear& a) {
  if (a.num_tokens < 1 || a.out_features < 1 || a.in_features < 1) return "tokens, in_features and out_features must be at least 1";
  if (Format::kPacked && a.in_features % 32) return "in_features must be a multiple of 32: pad x and the weight";
  if (Format::kActivationBits == 8 && (!a.x_scales || a.x_scale_stride % 4 || a.x_scale_stride < a.num_tokens))
    return "int8 activations need x_scales whose stride is a multiple of 4 and at least num_tokens";
  if (a.num_tokens <= 8) return launch<Variant<Format, 1>>(a);
  if (a.num_tokens <= 16) return launch<Variant<Format, 2>>(a);
  if (a.num_tokens <= 32) return launch<Variant<Format, 4>>(a);
  return launch<Variant<Format, kMostTokenTiles>>(a);
}

}  // namespace mlspec::portable
