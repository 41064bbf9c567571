// Many tokens: x [tokens, in] times a bfloat16 weight [out, in], bit for bit what bf16_linear.cu computes.
//
// A block stays on its multiprocessor and takes one tile of 128 outputs x 256 tokens after another. The sums of a tile are those
// of linear_tile.cuh: inputs in ascending order, in as many parts as that weight has ranks there, added in order. One block
// computes all parts, so finished parts wait in `partial`, in the L2 cache. Two blocks form a cluster: neighbouring outputs of the
// same tokens, of which each loads one half for both.
#include "bf16_linear_prefill.h"
#include "../rows/row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kOutputs = 128, kTokens = 256, kInputs = 64;  // of a tile, of a stage
constexpr int kCluster = 2, kGroups = 2;                    // blocks; groups of four warps that multiply, 64 outputs each
constexpr int kWeightBytes = kOutputs * kInputs * 2, kHalfTokenBytes = kTokens / 2 * kInputs * 2;
constexpr int kStageBytes = kWeightBytes + 2 * kHalfTokenBytes, kStages = 4;
constexpr int kOutBytes = kTokens / 2 * 64 * 2;  // half of the tokens of a group's outputs
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kSharedBytes = Ring::kFrontBytes + kStages * kStageBytes + kGroups * kOutBytes;
constexpr int kTilesAcross = 8;  // tiles of tokens that are worked on side by side: their inputs stay in the L2 cache
constexpr int kTokenTiles = kTokens / 8;

struct PrefillMaps {
  CUtensorMap x, weight, out;
};

struct PrefillParams {
  const void* bias;
  float4* partial;
  int out_features, chunks, ranks, pairs, token_tiles, units;
  bool bias_is_float32;
};

// Which tile: units run over blocks of tokens x all pairs of output tiles.
struct Place {
  int first_token, first_output;

  __device__ __forceinline__ Place(const PrefillParams& p, int unit, int rank) {
    const int group = unit / (kTilesAcross * p.pairs), rest = unit % (kTilesAcross * p.pairs);
    const int across = min(kTilesAcross, p.token_tiles - group * kTilesAcross);
    first_token = (group * kTilesAcross + rest % across) * kTokens;
    first_output = (rest / across * kCluster + rank) * kOutputs;
  }
};

__device__ __forceinline__ void produce(const PrefillMaps& maps, const PrefillParams& p, Ring ring, int rank) {
  const uint64_t policy = policy_evict_last();
  int slot = 0, round = 0;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int unit = blockIdx.x / kCluster; unit < p.units; unit += gridDim.x / kCluster) {
    const Place place(p, unit, rank);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      if (round) barrier_wait(ring.empty(slot), (round - 1) & 1);
      const uint32_t stage = ring.address + slot * kStageBytes, full = ring.full(slot);
      barrier_arrive_expect(full, kStageBytes);
      copy_box(stage, &maps.weight, chunk * kInputs, place.first_output, full, policy);
      copy_box_to_cluster(stage + kWeightBytes + rank * kHalfTokenBytes, &maps.x, chunk * kInputs,
                       place.first_token + rank * (kTokens / 2), full, (1 << kCluster) - 1);
      if (++slot == kStages) slot = 0, ++round;
    }
  }
}

// Of a group of warps: the sums of its 64 outputs x all tokens, added over the chunks up to `last`.
struct Multiplier {
  Ring ring;
  uint32_t first_weights;
  int slot, parity, lane;

  __device__ __forceinline__ void release(int stage) const {
    if (lane < kCluster) barrier_arrive_at(ring.empty(stage), lane);
  }
  __device__ __forceinline__ void run(float (&sums)[kTokenTiles][4], int chunks) {
    int previous = 0;
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      barrier_wait(ring.full(slot), parity);
      const uint32_t stage = ring.address + slot * kStageBytes;
      const uint32_t weights = swizzled_tile_address(stage + first_weights);
      const uint32_t tokens = swizzled_tile_address(stage + kWeightBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kInputs / 16; ++step)
        wgmma(sums, swizzled_tile_descriptor(weights + step * 2), swizzled_tile_descriptor(tokens + step * 2));
      wgmma_commit();
      wgmma_wait<1>();
      if (i > 0) release(previous);
      previous = slot;
      if (++slot == kStages) slot = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    if (chunks > 0) release(previous);
  }
};

__device__ __forceinline__ int border_of(const PrefillParams& p, int rank) {
  constexpr int kOfShare = kTileInputs / kInputs;
  const int shares = (p.chunks + kOfShare - 1) / kOfShare;
  return min(shares * rank / p.ranks * kOfShare, p.chunks);
}

// Finished parts so far plus these sums, which then are the finished parts.
__device__ __forceinline__ void add_finished(float (&sums)[kTokenTiles][4], const float4* finished) {
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    const float4 v = finished ? __ldcg(finished + t * 128) : float4{0.f, 0.f, 0.f, 0.f};
    sums[t][0] = __fadd_rn(v.x, sums[t][0]), sums[t][1] = __fadd_rn(v.y, sums[t][1]);
    sums[t][2] = __fadd_rn(v.z, sums[t][2]), sums[t][3] = __fadd_rn(v.w, sums[t][3]);
  }
}

__device__ __forceinline__ float bias_of(const PrefillParams& p, int output) {
  if (!p.bias || output >= p.out_features) return 0.f;
  if (p.bias_is_float32) return static_cast<const float*>(p.bias)[output];
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[output]);
}

// Where a group of warps puts its outputs before they are stored, half of the tokens at a time: rows of 128 bytes are tokens.
struct OutputBuffer {
  uint32_t address, place;  // place: of this lane's row of a matrix
  int group;
  bool leads;

  template <int kHalf>
  __device__ __forceinline__ void store(const PrefillMaps& maps, const float (&sums)[kTokenTiles][4], int output, int token) const {
    if (leads) wait_for_stores();
    sync_group(group);
#pragma unroll
    for (int i = 0; i < kTokenTiles / 2; i += 2) {
      constexpr int kFirst = kHalf * kTokenTiles / 2;
      store_transposed(place + i * 8 * 128, narrowed(sums[kFirst + i][0], sums[kFirst + i][1]),
                       narrowed(sums[kFirst + i][2], sums[kFirst + i][3]),
                       narrowed(sums[kFirst + i + 1][0], sums[kFirst + i + 1][1]),
                       narrowed(sums[kFirst + i + 1][2], sums[kFirst + i + 1][3]));
    }
    fence_async_reads();
    sync_group(group);
    if (leads) {
      store_box(&maps.out, output, token + kHalf * (kTokens / 2), address);
      commit_stores();
    }
  }
};

__device__ __forceinline__ void add_bias(const PrefillParams& p, float (&sums)[kTokenTiles][4], int output) {
  if (!p.bias) return;
  const float low = bias_of(p, output), high = bias_of(p, output + 8);
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    sums[t][0] = __fadd_rn(sums[t][0], low), sums[t][1] = __fadd_rn(sums[t][1], low);
    sums[t][2] = __fadd_rn(sums[t][2], high), sums[t][3] = __fadd_rn(sums[t][3], high);
  }
}

__device__ __forceinline__ void multiply(const PrefillMaps& maps, const PrefillParams& p, Ring ring, int rank) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t buffer = ring.address + kStages * kStageBytes + group * kOutBytes;
  const OutputBuffer out{buffer, buffer + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2 ^ lane % 8) << 4), group,
                         warp == 0 && elect_lane()};
  float4* partial = p.partial + size_t(blockIdx.x * kGroups + group) * kTokenTiles * 128 + threadIdx.x % 128;
  Multiplier multiplier{ring, uint32_t(group * 64 * kInputs * 2), 0, 0, lane};
#pragma unroll 1
  for (int unit = blockIdx.x / kCluster; unit < p.units; unit += gridDim.x / kCluster) {
    float sums[kTokenTiles][4];
#pragma unroll 1
    for (int part = 0; part < p.ranks; ++part) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) sums[t][0] = sums[t][1] = sums[t][2] = sums[t][3] = 0.f;
      multiplier.run(sums, border_of(p, part + 1) - border_of(p, part));
      if (p.ranks > 1) add_finished(sums, part ? partial : nullptr);
      if (part + 1 < p.ranks) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
          __stcg(partial + t * 128, float4{sums[t][0], sums[t][1], sums[t][2], sums[t][3]});
      }
    }
    const Place place(p, unit, rank);
    const int output = place.first_output + group * 64;
    add_bias(p, sums, output + warp * 16 + lane / 4);
    out.store<0>(maps, sums, output, place.first_token);
    out.store<1>(maps, sums, output, place.first_token);
  }
  wait_for_stores();
}

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillMaps maps, const PrefillParams p) {
  extern __shared__ __align__(1024) uint8_t front[];
  const Ring ring{unknown_to_compiler(shared_address(front + Ring::kFrontBytes))};
  const int rank = int(cluster_rank());
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(ring.full(i), 1), barrier_init(ring.empty(i), kCluster * kGroups * 4);
    barrier_init_done();
  }
  cluster_sync();
  if (threadIdx.x >= 128 * kGroups) {
    release_registers<24>();
    if (threadIdx.x / 32 == 4 * kGroups && elect_lane()) produce(maps, p, ring, rank);
  } else {
    take_registers<240>();
    multiply(maps, p, ring, rank);
  }
  __syncwarp();
  cluster_exit();  // nobody leaves to whom the other still sends
}

int multiprocessors() {
  static const int count = [] {
    int device = 0, found = kMultiprocessors;
    if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device);
    return found;
  }();
  return count;
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

namespace {

int ranks_of(const mlspec_cuda_linear& a) {
  if (a.ranks) return a.ranks;
  return ranks_of_shape(blocks_of(a.outputs_of_weight ? a.outputs_of_weight : a.out_features, kTileOutputs),
                        blocks_of(a.in_features, kTileInputs), false);
}

}  // namespace

// In turns of all multiprocessors, each as long as one of these tiles takes: the kernel for few tokens shares a tile's inputs.
bool mlspec::prefill_is_faster(const mlspec_cuda_linear& a) {
  if (a.out_features % 8 || a.num_tokens < kTokens) return false;
  const int tiles = blocks_of(a.num_tokens, kTokens), ranks = ranks_of(a), places = multiprocessors();
  const int turns = blocks_of(int64_t(tiles) * blocks_of(a.out_features, kCluster * kOutputs), places / kCluster);
  const int short_turns = blocks_of(int64_t(tiles) * blocks_of(a.out_features, kOutputs) * ranks, places);
  return turns * ranks <= short_turns;
}

int64_t mlspec_cuda_bf16_partial_bytes(const mlspec_cuda_linear* args) {
  if (ranks_of(*args) == 1 || (args->variant != kPrefillVariant && !prefill_is_faster(*args))) return 0;
  return int64_t(multiprocessors()) / kCluster * kCluster * kOutputs * kTokens * 4;
}

const char* mlspec::launch_bf16_prefill(const mlspec_cuda_linear& a) {
  if (a.out_features % 8) return "out_features must be a multiple of 8";
  PrefillParams p = {};
  p.bias = a.bias, p.bias_is_float32 = a.bias_is_float32 != 0, p.partial = static_cast<float4*>(a.partial);
  p.out_features = int(a.out_features), p.chunks = blocks_of(a.in_features, kInputs);
  p.pairs = blocks_of(a.out_features, kOutputs * kCluster), p.token_tiles = blocks_of(a.num_tokens, kTokens);
  p.units = p.pairs * p.token_tiles;
  p.ranks = ranks_of(a);
  if (p.ranks > blocks_of(a.in_features, kTileInputs)) return "each rank needs inputs of its own";
  if (p.ranks > 1 && !p.partial) return "this weight needs room for partial sums";
  PrefillMaps maps = {};
  if (const char* problem = describe(&maps.x, a.x, a.num_tokens, a.in_features, 2, kTokens / 2)) return problem;
  if (const char* problem = describe(&maps.weight, a.tiles, a.out_features, a.in_features, 2, kOutputs)) return problem;
  if (const char* problem = describe(&maps.out, a.out, a.num_tokens, a.out_features, 2, kTokens / 2)) return problem;
  if (const char* problem = message(cudaFuncSetAttribute(prefill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)))
    return problem;
  const int clusters = multiprocessors() / kCluster;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(kCluster * (p.units < clusters ? p.units : clusters)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(a.stream);
  config.attrs = &attribute;
  config.numAttrs = a.overlap ? 1 : 0;
  return message(cudaLaunchKernelEx(&config, prefill_kernel, maps, p));
}
