// How do a few tokens of an expert meet its packed weights on Hopper? Every warp on its own: 16 outputs, one half of the chunks.
//
// The sums are those of expert_linear.cuh, in its order. The copy engine brings a warp its weights, a barrier a stage, and the tokens lie
// in shared memory once: what is left to a warp is to load and multiply.
#pragma once

#include "expert_block.cuh"

namespace mlspec::portable {

constexpr int kUnit = 16;  // outputs of a warp

// Formats whose tiles of 16 outputs lie in a piece for each part, in one array.
template <class Format>
constexpr bool kFewByWarps = Format::kPacked && !kReadsMore<Format>;

// kUnitsOf: of a block, each for the warps of both groups. kRowsOf: that there is room for, 1 or 8; where there is one all columns are it.
template <class FormatType, int kUnitsOf, int kRowsOf>
struct FewVariant {
  using Format = FormatType;
  using Dot = typename std::conditional<Format::kActivationBits == 8, int, float>::type;
  static constexpr int kUnits = kUnitsOf, kWarps = kGroupsOfWarps * kUnits, kThreadsOf = 32 * kWarps;
  static constexpr int kTokenTiles = 1, kTokens = kRowsOf;
  static constexpr int kRowBytes = Format::kChunk * Format::kActivationBits / 8, kChunkBytes = kTokens * kRowBytes;
  static constexpr int kScalesOfChunk = Format::kActivationBits == 8 ? Format::kGroups * kTokens : 0;  // of tokens
  static constexpr int kStageBytes = Format::kTileBytes * (kWarps / 4);  // four warps have what a tile has
  static constexpr int kMostStages = 8, kSumStride = kUnits * kUnit + 4;
  static_assert(kWarps % 4 == 0 && (kTokens == 1 || kTokens == 8), "whole tiles, and one row or those of a matrix");

  static int shared_bytes(int stages, int chunks) {
    const int tokens = chunks * (kChunkBytes + kScalesOfChunk * 4) + 32;  // columns without a token read behind the scales
    const int ring = stages * kStageBytes, sums = 8 * kSumStride * 4;
    return (ring > sums ? ring : sums) + tokens;
  }
};

struct FewParams {
  ExpertParams e;
  int stages, ring_bytes;  // as many as a warp has chunks, or kMostStages
};

template <class V>
__device__ __forceinline__ void multiply_few(float (&sums)[1][4], const typename V::Format& format, uint32_t tokens, const float* x_scales,
                                             int lane) {
  using Format = typename V::Format;
  constexpr bool kScaled = Format::kGroups > 0, kTokenSums = Format::kActivationBits == 8 && Format::kHasZeros;
  constexpr int kAllSteps = V::kRowBytes / 32, kGroups = kScaled ? Format::kGroups : 1, kOfGroup = kAllSteps / kGroups;
  const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
  const int row = V::kTokens == 1 ? 0 : lane % 8;
  const uint32_t place = row * 128 + ((lane / 8 ^ row) << 4);
  uint32_t b[4];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    typename V::Dot dots[1][4] = {};
    int token_sums[1][4] = {};
#pragma unroll
    for (int step = g * kOfGroup; step < (g + 1) * kOfGroup; ++step) {
      if (step % 2 == 0) load_matrices(b, tokens + (place ^ (step % 4 * 32)) + step / 4 * (V::kTokens * 128));
      uint32_t a[4];
      format.fragment(a, step);
      if constexpr (kScaled) mma(dots[0], a, b[step % 2 * 2], b[step % 2 * 2 + 1]);
      else mma(sums[0], a, b[step % 2 * 2], b[step % 2 * 2 + 1]);
      if constexpr (kTokenSums) mma(token_sums[0], ones, b[step % 2 * 2], b[step % 2 * 2 + 1]);
    }
    if constexpr (kScaled) add_scaled<V>(sums, dots, format, x_scales, token_sums, g, lane);
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What one warp reads of its unit: [parts of a tile], a quarter of each.
template <class Format>
struct UnitCopier {
  const uint8_t* weights;  // of the expert
  int unit, tiles, stride;  // tiles of a row of them; bytes of a tile as stored
  uint32_t quarter;         // which of a tile in shared memory the warp has
  int planes;
  uint64_t policy;

  __device__ __forceinline__ int bytes() const {
    if constexpr (Format::kPrefix) return (Format::kScaleBytes + planes * kPlaneBytes) / 4;
    else return Format::kTileBytes / 4;
  }
  __device__ __forceinline__ void part(uint32_t to, const uint8_t* tile, int start, int size, uint32_t barrier) const {
    copy_bulk(to + start + quarter * (size / 4), tile + start + unit % 4 * (size / 4), size / 4, barrier, policy);
  }
  // By one lane.
  __device__ __forceinline__ void copy(uint32_t to, int chunk, uint32_t barrier) const {
    const int tile = unit / 4;
    const uint8_t* const from = weights + ((int64_t(tile / 2) * tiles + chunk) * 2 + tile % 2) * int64_t(stride);
    barrier_arrive_expect(barrier, bytes());
    if constexpr (Format::kPrefix) {
      part(to, from, 0, Format::kScaleBytes, barrier);
      for (int plane = 0; plane < planes; ++plane) part(to, from, Format::kScaleBytes + plane * kPlaneBytes, kPlaneBytes, barrier);
    } else {
      constexpr int kScaled = Format::kTileBytes - kCodeBytes, kZeros = Format::kHasZeros ? kScaled / 3 : 0;
      part(to, from, 0, kCodeBytes, barrier);
      part(to, from, kCodeBytes, kScaled - kZeros, barrier);
      if constexpr (kZeros > 0) part(to, from, Format::kTileBytes - kZeros, kZeros, barrier);
    }
  }
};

// The rows of an item, whole, in the order that matrices are read in; zeros behind their ends.
template <class V>
__device__ __forceinline__ void read_tokens(const ExpertParams& e, const int* tokens, int rows, uint8_t* to, float* scales) {
  using Format = typename V::Format;
  const Params& p = e.p;
  constexpr int kPieces = V::kRowBytes / 16;
  const int all = p.chunks * kPieces;
  const int64_t bytes_of_row = int64_t(p.in_features) * Format::kActivationBits / 8;
  for (int row = 0; row < rows; ++row) {
    const uint8_t* const from = p.x + tokens[row] * bytes_of_row;
    for (int i = threadIdx.x; i < all; i += V::kThreadsOf) {
      const int piece = i % kPieces;
      uint4 v = {0, 0, 0, 0};
      if (i * 16 < bytes_of_row) v = __ldcg(reinterpret_cast<const uint4*>(from) + i);
      const int place = i / kPieces * V::kChunkBytes + piece / 8 * (V::kTokens * 128) + row * 128 + ((piece % 8 ^ row) << 4);
      *reinterpret_cast<uint4*>(to + place) = v;
    }
    if constexpr (V::kScalesOfChunk > 0)
      for (int group = threadIdx.x; group < p.chunks * Format::kGroups; group += V::kThreadsOf)
        scales[group * V::kTokens + row] = __ldcg(p.x_scales + group * p.x_scale_stride + tokens[row]);
  }
}

#endif

template <class V>
__global__ void __launch_bounds__(V::kThreadsOf) few_kernel(const __grid_constant__ FewParams f) {
#if __CUDA_ARCH__ >= 900
  using Format = typename V::Format;
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ int pairs[V::kTokens], tokens[V::kTokens];
  __shared__ __align__(8) uint64_t arrived[V::kWarps][V::kMostStages];
  launch_dependents();
  const ExpertParams& e = f.e;
  const Params& p = e.p;
  const int block = blockIdx.x / e.most_items;
  const int32_t* const item = e.plan + p.num_tokens + 3 * (blockIdx.x % e.most_items);
  const int expert = __ldcg(item), first = __ldcg(item + 1), rows = min(__ldcg(item + 2), V::kTokens);
  if (rows == 0) {
    wait_for_previous_kernel();
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / V::kUnits, own = warp % V::kUnits;
  const bool gated = e.activation >= 0;
  constexpr int kHalfUnits = V::kUnits / 2;
  const int unit = !gated             ? block * V::kUnits + own
                   : own < kHalfUnits ? block * kHalfUnits + own
                                      : p.out_features / 2 / kUnit + block * kHalfUnits + own - kHalfUnits;
  const uint32_t ring = shared_address(stages), barriers = shared_address(arrived[warp]);
  const int chunks = (p.chunks - group + kGroupsOfWarps - 1) / kGroupsOfWarps;
  UnitCopier<Format> copier{p.weights + expert * e.bytes_of_expert, unit, p.chunks, Format::kTileBytes, uint32_t(warp % 4), 0, 0};
  if constexpr (Format::kPrefix) copier.stride = p.tile_stride, copier.planes = p.num_planes;
  const uint32_t of_warp = ring + warp / 4 * Format::kTileBytes;
  if (lane == 0) {
    copier.policy = policy_evict_first();
    for (int i = 0; i < f.stages; ++i) barrier_init(barriers + i * 8, 1);
    barrier_init_done();
    for (int i = 0; i < min(f.stages, chunks); ++i) copier.copy(of_warp + i * V::kStageBytes, i * kGroupsOfWarps + group, barriers + i * 8);
  }
  int shift = 0;
  if constexpr (Format::kHasShift) shift = p.exponent_shift[expert * e.shifts_of_expert];
  Format format;
  format.prepare(p);
  const LanePlace place = Format::place(warp % 4, lane);
  wait_for_previous_kernel();
  if (threadIdx.x < rows) {
    const int pair = e.plan[first + threadIdx.x];
    pairs[threadIdx.x] = pair, tokens[threadIdx.x] = pair / e.pairs_of_token;
  }
  __syncthreads();
  uint8_t* const rows_at = stages + f.ring_bytes;
  float* const scales_at = reinterpret_cast<float*>(rows_at + p.chunks * V::kChunkBytes);
  read_tokens<V>(e, tokens, rows, rows_at, scales_at);
  __syncthreads();
  float sums[1][4] = {};
  const uint32_t tokens_at = shared_address(rows_at);
  int slot = 0, parity = 0;
  for (int i = 0; i < chunks; ++i) {
    const int chunk = i * kGroupsOfWarps + group;
    barrier_wait(barriers + slot * 8, parity);
    format.load(stages + warp / 4 * Format::kTileBytes + slot * V::kStageBytes, place);
    multiply_few<V>(sums, format, tokens_at + chunk * V::kChunkBytes, scales_at + chunk * V::kScalesOfChunk, lane);
    if (i + f.stages < chunks) {
      __syncwarp();
      if (lane == 0)
        copier.copy(of_warp + slot * V::kStageBytes, (i + f.stages) * kGroupsOfWarps + group, barriers + slot * 8);
    }
    if (++slot == f.stages) slot = 0, parity ^= 1;
  }
  float* const total = reinterpret_cast<float*>(stages);  // [row, output], where the ring was
  const auto place_of = [&](int c) { return (lane % 4 * 2 + c % 2) * V::kSumStride + own * kUnit + lane / 4 + c / 2 * 8; };
  __syncthreads();
  if (group == 1)
    for (int c = 0; c < 4; ++c) total[place_of(c)] = sums[0][c];
  __syncthreads();
  if (group == 0)
    for (int c = 0; c < 4; ++c) total[place_of(c)] = __fadd_rn(sums[0][c], total[place_of(c)]);
  __syncthreads();
  float out_scale = Format::kOutScale;
  if constexpr (Format::kHasShift) out_scale *= exp2f(float(shift));
  if constexpr (Format::kPrefix) out_scale *= Format::out_scale(p);
  const void* bias = p.bias ? static_cast<const uint8_t*>(p.bias) + int64_t(expert) * p.out_features * (p.bias_is_float32 ? 4 : 2) : nullptr;
  const auto sum_of = [&](int row, int output) { return *reinterpret_cast<const float4*>(total + row * V::kSumStride + output); };
  constexpr int kOutputs = V::kUnits * kUnit;
  const int width = gated ? kOutputs / 2 : kOutputs, quads = width / 4;
  for (int i = threadIdx.x; i < rows * quads; i += V::kThreadsOf) {
    const int row = i / quads, output = i % quads * 4, at = block * width + output;
    if (gated) {
      const float4 both[2] = {sum_of(row, output), sum_of(row, width + output)};
      store_gated(e, bias, both, out_scale, pairs[row], at);
    } else if (e.limit > 0.f) {
      store_pairs(e, bias, sum_of(row, output), out_scale, pairs[row], at);
    } else {
      store_outputs(p, bias, sum_of(row, output), out_scale, pairs[row], at);
    }
  }
#endif
}

template <class V>
const char* launch_few(const mlspec_cuda_expert_linear& args, int most_stages) {
  ExpertParams e;
  if (const char* problem = params_of_experts<typename V::Format>(args, e)) return problem;
  const int own = (e.p.chunks + kGroupsOfWarps - 1) / kGroupsOfWarps, stages = own < most_stages ? own : most_stages;
  const int shared = V::shared_bytes(stages, e.p.chunks), tokens = V::shared_bytes(0, e.p.chunks) - 8 * V::kSumStride * 4;
  const FewParams params{e, stages, shared - tokens};
  const int64_t blocks = (e.p.out_features + V::kUnits * kUnit - 1) / (V::kUnits * kUnit) * int64_t(e.most_items);
  if (blocks > INT32_MAX) return "too many tokens times outputs for one launch: call it for fewer tokens";
  if (const char* problem = message(cudaFuncSetAttribute(few_kernel<V>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)))
    return problem;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(V::kThreadsOf), config.dynamicSmemBytes = size_t(shared);
  config.stream = static_cast<cudaStream_t>(args.linear.stream);
  config.attrs = &attribute, config.numAttrs = args.linear.overlap ? 1 : 0;
  return message(cudaLaunchKernelEx(&config, few_kernel<V>, params));
}

}  // namespace mlspec::portable
