// How does a GPU send tokens to experts without the host? Logits, then the largest of each token, then the pairs in order of experts.
//
// Kernels that write a plan let no other start before they have ended: products read it at once, while they still wait for their inputs.
// What was written is seen without that wait only behind a fence, by every thread that wrote.
//
// A logit is summed by one warp: lane l takes inputs 8 l .. 8 l + 7 of every 256, lanes are added in a tree: an order of its own,
// however many tokens there are. Which place a pair has among those of its expert may differ from run to run; it moves no bit.
#include <type_traits>

#include "../rows/row_launch.cuh"
#include "experts.h"

namespace mlspec {
namespace {

constexpr int kLogitWarps = 8, kChooseWarps = 8, kPlanThreads = 1024;
constexpr int kRouteBlocks = 8, kRouteThreads = 512, kRoutePerLane = 8;  // of a cluster that routes one token
constexpr unsigned kAll = 0xFFFFFFFFu;

// Of one score and kTokens tokens from `first` on, by one warp.
template <class Weight, int kTokens>
__device__ __forceinline__ void sum_logits(const mlspec_cuda_routing& p, int score, int64_t first, int lane) {
  const int scores = p.num_experts + p.has_shared, tokens = int(min(int64_t(kTokens), p.num_tokens - first));
  const Weight* row = static_cast<const Weight*>(p.router) + int64_t(score) * p.hidden;
  const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(p.x) + first * p.hidden;
  float sums[kTokens] = {};
#pragma unroll (kTokens == 1 ? 4 : 1)
  for (int64_t i = lane * kVector; i < p.hidden; i += kWarp * kVector) {
    float w[kVector];
    load_vector(row + i, w);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= tokens) break;
      float v[kVector];
      load_vector(x + t * p.hidden + i, v);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sums[t] = __fmaf_rn(v[j], w[j], sums[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const float sum = warp_sum(sums[t]);
    if (lane == 0 && t < tokens) p.logits[(first + t) * scores + score] = p.bias ? __fadd_rn(sum, p.bias[score]) : sum;
  }
}

template <class Weight, int kTokens>
__global__ void __launch_bounds__(kLogitWarps* kWarp) logits_kernel(const __grid_constant__ mlspec_cuda_routing p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int score = blockIdx.x * kLogitWarps + threadIdx.x / kWarp;
  if (score < p.num_experts + p.has_shared)
    sum_logits<Weight, kTokens>(p, score, int64_t(blockIdx.y) * kTokens, threadIdx.x % kWarp);
}

// Greater for a greater number, 1 for NaN; 0 is left for what is no candidate. Both zeros are one number.
__device__ __forceinline__ uint32_t ordered(float value) {
  if (isnan(value)) return 1;
  const uint32_t bits = __float_as_uint(value + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// What `ordered` made a key of; NaN is NaN again.
__device__ __forceinline__ float number_of(uint32_t key) {
  if (key <= 1) return __uint_as_float(0x7FC00000u);
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// What a lane knows of its experts l, l + 32 and so on: keys of what they are chosen by, 0 once chosen, and what weighs them.
template <int kPerLane>
struct Choice {
  uint32_t keys[kPerLane];
  float own[kPerLane];

  // The expert of the largest key, of equal ones the lowest number, and its key: the same in all lanes. within: of experts.
  __device__ __forceinline__ int largest(int lane, int first, int end, uint32_t& best) const {
    uint32_t key = 0;
    int expert = end;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int at = i * kWarp + lane;
      if (at >= first && at < end && keys[i] > key) key = keys[i], expert = at;
    }
    best = __reduce_max_sync(kAll, key);
    return int(__reduce_min_sync(kAll, unsigned(key == best ? expert : end)));
  }
  __device__ __forceinline__ float take(int lane, int winner) {
    float value = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i * kWarp + lane == winner) keys[i] = 0, value = own[i];
    return __shfl_sync(kAll, value, winner % kWarp);
  }
};

// Keys of experts outside of the best groups become those of -Inf. A group is as good as the sum of its two largest.
template <int kPerLane>
__device__ __forceinline__ void look_at_groups(const mlspec_cuda_routing& p, Choice<kPerLane>& choice, int lane) {
  const int size = p.num_experts / p.groups;
  uint32_t sums[2] = {0, 0};  // of groups l and l + 32
  for (int group = 0; group < p.groups; ++group) {
    const int first = group * size, end = first + size;
    uint32_t one, two = 0;
    const int winner = choice.largest(lane, first, end, one);
    uint32_t taken = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i * kWarp + lane == winner) taken = choice.keys[i], choice.keys[i] = 0;
    choice.largest(lane, first, end, two);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i * kWarp + lane == winner) choice.keys[i] = taken;
    if (group % kWarp == lane) sums[group / kWarp] = ordered(__fadd_rn(number_of(one), number_of(two)));
  }
  uint64_t seen = 0;
  for (int rank = 0; rank < p.chosen_groups; ++rank) {
    const int own = sums[1] > sums[0] ? 1 : 0;  // of equal ones the lower number
    const uint32_t best = __reduce_max_sync(kAll, sums[own]);
    const int group = int(__reduce_min_sync(kAll, unsigned(sums[own] == best ? own * kWarp + lane : 2 * kWarp)));
    if (group % kWarp == lane) sums[group / kWarp] = 0;
    seen |= uint64_t(1) << group;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    if (expert < p.num_experts && !(seen >> (expert / size) & 1)) choice.keys[i] = ordered(-INFINITY);
  }
}

// weights: shares of softmax, or, of sigmoids, these; `total` is what divides them.
template <int kPerLane>
__device__ __forceinline__ float take_experts(const mlspec_cuda_routing& p, Choice<kPerLane>& choice, int64_t token, int lane,
                                              float* weights) {
  float largest = 0.f, total = p.choice_bias ? 1e-20f : 0.f;  // as transformers has it
  for (int rank = 0; rank < p.chosen; ++rank) {
    uint32_t best;
    const int winner = choice.largest(lane, 0, p.num_experts, best);
    const float own = choice.take(lane, winner);
    if (rank == 0) largest = own;
    const float weight = p.choice_bias ? own : expf(own - largest);
    total += weight;
    if (lane == 0) p.experts[token * p.chosen + rank] = winner, weights[rank] = weight;
  }
  if (p.renormalize) return total;
  if (p.choice_bias) return 1.f;
  total = 0.f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) total += i * kWarp + lane < p.num_experts ? expf(choice.own[i] - largest) : 0.f;
  return warp_sum(total);
}

// The experts of one token, by one warp.
template <int kPerLane>
__device__ __forceinline__ void choose_experts(const mlspec_cuda_routing& p, int64_t token, int lane) {
  const int scores = p.num_experts + p.has_shared, places = p.chosen + p.has_shared;
  const float* logits = p.logits + token * scores;
  float* weights = p.weights + token * places;
  Choice<kPerLane> choice;
  bool broken = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    const bool is_one = expert < p.num_experts;
    float own = is_one ? logits[expert] : 0.f;
    broken |= is_one && isnan(own);
    if (p.choice_bias && is_one) own = 1.f / (1.f + expf(-own));
    choice.own[i] = own;
    choice.keys[i] = !is_one ? 0 : ordered(p.choice_bias ? __fadd_rn(own, p.choice_bias[expert]) : own);
  }
  broken = __any_sync(kAll, broken);
  if (p.choice_bias && p.chosen_groups < p.groups) look_at_groups(p, choice, lane);
  const float total = take_experts(p, choice, token, lane, weights);
  __syncwarp();
  const float nan = __uint_as_float(0x7FC00000u);
  for (int rank = lane; rank < p.chosen; rank += kWarp) {
    const float weight = weights[rank] / total;
    weights[rank] = broken ? nan : p.choice_bias ? weight * p.scale : weight;
  }
  if (p.has_shared && lane == 0) weights[p.chosen] = broken ? nan : 1.f / (1.f + expf(-logits[p.num_experts]));
}

template <int kPerLane>
__global__ void __launch_bounds__(kChooseWarps* kWarp) choose_kernel(const __grid_constant__ mlspec_cuda_routing p) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t token = int64_t(blockIdx.x) * kChooseWarps + threadIdx.x / kWarp;
  if (token < p.num_tokens) choose_experts<kPerLane>(p, token, threadIdx.x % kWarp);
}

// Of all threads before this one and its own: [1] items above [0] pairs. totals: [32] of shared memory.
__device__ __forceinline__ uint64_t sum_up_to(uint64_t value, uint64_t* totals) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint64_t before = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += before;
  }
  if (lane == kWarp - 1) totals[warp] = value;
  __syncthreads();
  uint64_t others = lane < warp ? totals[lane] : 0;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) others += __shfl_xor_sync(kAll, others, step);
  return value + others;
}

// By one block of kPlanThreads. kPerLane: 0 where the experts are chosen already.
template <int kPerLane>
__device__ __forceinline__ void plan_pairs(const mlspec_cuda_routing& p, int rows_of_item, int most_items) {
  __shared__ int counts[MLSPEC_CUDA_MOST_EXPERTS];
  __shared__ uint64_t totals[kWarp];
  __shared__ int used;
  counts[threadIdx.x] = 0;
  if constexpr (kPerLane > 0)
    for (int64_t token = threadIdx.x / kWarp; token < p.num_tokens; token += kPlanThreads / kWarp)
      choose_experts<kPerLane>(p, token, threadIdx.x % kWarp);
  __syncthreads();
  const int pairs = int(p.num_tokens * p.chosen), expert = threadIdx.x;
  const auto is_here = [&](int at) { return at >= 0 && at < p.num_experts; };  // others are sent nowhere
  for (int pair = threadIdx.x; pair < pairs; pair += kPlanThreads)
    if (is_here(p.experts[pair])) atomicAdd(counts + p.experts[pair], 1);
  __syncthreads();
  const int own = counts[expert], items = (own + rows_of_item - 1) / rows_of_item;
  const uint64_t end = sum_up_to(uint64_t(items) << 32 | uint32_t(own), totals);
  const int first = int(uint32_t(end)) - own, first_item = int(end >> 32) - items;
  int32_t* const to = p.plan + pairs;
  for (int i = 0; i < items; ++i) {
    int32_t* const item = to + 3 * (first_item + i);
    item[0] = expert, item[1] = first + i * rows_of_item, item[2] = min(rows_of_item, own - i * rows_of_item);
  }
  counts[expert] = first;
  if (expert == kPlanThreads - 1) used = int(end >> 32);
  __syncthreads();
  for (int item = used + threadIdx.x; item < most_items; item += kPlanThreads)
    to[3 * item] = 0, to[3 * item + 1] = 0, to[3 * item + 2] = 0;
  for (int pair = threadIdx.x; pair < pairs; pair += kPlanThreads)
    if (is_here(p.experts[pair])) p.plan[atomicAdd(counts + p.experts[pair], 1)] = pair;
  __threadfence();
}

template <int kPerLane>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ mlspec_cuda_routing p, int rows_of_item,
                                                            int most_items) {
  wait_for_previous_kernel();
  plan_pairs<kPerLane>(p, rows_of_item, most_items);
}

template <int kVectors>
__device__ __forceinline__ void norm_row(const mlspec_cuda_routing& p, const mlspec_cuda_route_norm& norm,
                                         const float (&scale)[kVectors][kVector], __nv_bfloat16* line, float* totals) {
  const __nv_bfloat16 *x = static_cast<const __nv_bfloat16*>(p.x), *residual = static_cast<const __nv_bfloat16*>(norm.residual);
  const bool writes = blockIdx.x == 0;
  float row[kVectors][kVector], squares = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = int64_t(threadIdx.x + i * kRouteThreads) * kVector;
    if (at >= p.hidden) continue;
    float other[kVector];
    load_vector(x + at, row[i]);
    load_vector(residual + at, other);
#pragma unroll
    for (int e = 0; e < kVector; ++e) row[i][e] = rounded(row[i][e] + other[e]);
    if (writes) store_vector(static_cast<__nv_bfloat16*>(norm.total) + at, row[i]);
#pragma unroll
    for (int e = 0; e < kVector; ++e) squares = fmaf(row[i][e], row[i][e], squares);
  }
  const float inverse = rsqrtf(block_sum(squares, totals) / float(p.hidden) + norm.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = int64_t(threadIdx.x + i * kRouteThreads) * kVector;
    if (at >= p.hidden) continue;
#pragma unroll
    for (int e = 0; e < kVector; ++e) row[i][e] = row[i][e] * inverse * scale[i][e];
    store_vector(line + at, row[i]);
    if (writes) store_vector(static_cast<__nv_bfloat16*>(norm.normed) + at, row[i]);
  }
  __syncthreads();
}

// What a lane has of a row of the router before the token is there: of the pieces of 256 inputs the first few.
template <class Weight>
struct RouterRow {
  static constexpr int kPieces = sizeof(Weight) == 2 ? 12 : 4, kWords = sizeof(Weight) / 2;
  uint4 words[kPieces][kWords];

  __device__ __forceinline__ void read(const Weight* row, int64_t hidden, int lane) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int64_t at = (k * kWarp + lane) * kVector;
      if (at >= hidden) break;
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[k][i] = __ldg(reinterpret_cast<const uint4*>(row + at) + i);
    }
  }
  // As sum_logits: in its order.
  __device__ __forceinline__ float times(const Weight* row, const __nv_bfloat16* x, int64_t hidden, int lane) const {
    float sum = 0.f, v[kVector], w[kVector];
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int64_t at = (k * kWarp + lane) * kVector;
      if (at >= hidden) break;
      load_vector(reinterpret_cast<const Weight*>(words[k]), w);
      load_vector(x + at, v);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum = __fmaf_rn(v[j], w[j], sum);
    }
    for (int64_t at = (kPieces * kWarp + lane) * kVector; at < hidden; at += kWarp * kVector) {
      load_vector(row + at, w);
      load_vector(x + at, v);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum = __fmaf_rn(v[j], w[j], sum);
    }
    return warp_sum(sum);
  }
};

// What a block keeps while it chooses the experts of one token.
struct TokenChoice {
  float logits[kRoutePerLane * kWarp + 1], own[kRoutePerLane * kWarp], weights[kRoutePerLane * kWarp + 1];
  uint32_t keys[kRoutePerLane * kWarp];
  int32_t experts[kRoutePerLane * kWarp];
};

// By all threads of a block, as choose_experts: the rank of an expert is how many come before it. Not by groups.
template <int kPerLane>
__device__ __forceinline__ void rank_experts(const mlspec_cuda_routing& p, TokenChoice& token) {
  constexpr int kOf = kRouteThreads / (kPerLane * kWarp);  // threads of an expert
  const int expert = threadIdx.x / kOf, part = threadIdx.x % kOf;
  bool broken = false;
  if (part == 0 && expert < p.num_experts) {
    float own = token.logits[expert];
    broken = isnan(own);
    if (p.choice_bias) own = 1.f / (1.f + expf(-own));
    token.own[expert] = own;
    token.keys[expert] = ordered(p.choice_bias ? __fadd_rn(own, p.choice_bias[expert]) : own);
  }
  broken = __syncthreads_or(broken);
  int before = 0;
  if (expert < p.num_experts) {
    const uint32_t key = token.keys[expert];
#pragma unroll 8
    for (int other = part; other < p.num_experts; other += kOf)
      before += token.keys[other] > key || (token.keys[other] == key && other < expert);
  }
#pragma unroll
  for (int step = kOf / 2; step > 0; step /= 2) before += __shfl_xor_sync(kAll, before, step);
  if (part == 0 && expert < p.num_experts && before < p.chosen) token.experts[before] = expert;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const int lane = threadIdx.x;
  const float largest = token.own[token.experts[0]];
  for (int rank = lane; rank < p.chosen; rank += kWarp) {
    const float own = token.own[token.experts[rank]];
    token.weights[rank] = p.choice_bias ? own : expf(own - largest);
  }
  __syncwarp();
  float total = p.choice_bias ? 1e-20f : 0.f;
  if (p.renormalize) {
    for (int rank = 0; rank < p.chosen; ++rank) total += token.weights[rank];
  } else if (p.choice_bias) {
    total = 1.f;
  } else {
    for (int i = 0; i < kPerLane; ++i) total += i * kWarp + lane < p.num_experts ? expf(token.own[i * kWarp + lane] - largest) : 0.f;
    total = warp_sum(total);
  }
  __syncwarp();
  const float nan = __uint_as_float(0x7FC00000u);
  for (int rank = lane; rank < p.chosen; rank += kWarp) {
    const float weight = token.weights[rank] / total;
    token.weights[rank] = broken ? nan : p.choice_bias ? weight * p.scale : weight;
  }
  if (p.has_shared && lane == 0) token.weights[p.chosen] = broken ? nan : 1.f / (1.f + expf(-token.logits[p.num_experts]));
}

// All of it for one token, by one cluster: a warp has a score, which goes to the memory of the first block; that block chooses, and
// as every expert has one pair, the plan is the choice. The router, which no kernel in front writes, is there before these end.
// kVectors above 0: every block norms the token for itself, its threads have the elements that those of rms_norm_kernel
// (rows/row_ops.cu) have; the first one writes what others read.
template <class Weight, int kPerLane, int kVectors>
__global__ void __launch_bounds__(kRouteThreads)
    route_token_kernel(const __grid_constant__ mlspec_cuda_routing p, const __grid_constant__ mlspec_cuda_route_norm norm) {
#if __CUDA_ARCH__ >= 900
  __shared__ __align__(16) __nv_bfloat16 line[kVectors > 0 ? kVectors * kRouteThreads * kVector : kVector];
  __shared__ float totals[kWarp];
  float scale[kVectors > 0 ? kVectors : 1][kVector];
  __shared__ TokenChoice token;
  const int lane = threadIdx.x % kWarp, warp = (blockIdx.x * kRouteThreads + threadIdx.x) / kWarp;
  const int scores = p.num_experts + p.has_shared, warps = kRouteBlocks * kRouteThreads / kWarp;
  RouterRow<Weight> row;
  const Weight* const router = static_cast<const Weight*>(p.router);
  if (warp < scores) row.read(router + warp * p.hidden, p.hidden, lane);
  for (int score = warp + warps; score < scores; score += warps) {
    const int64_t bytes = p.hidden * int64_t(sizeof(Weight));
    const char* from = reinterpret_cast<const char*>(router) + score * bytes;
    for (int64_t byte = lane * 128; byte < bytes; byte += kWarp * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + byte));
  }
  mlspec_cuda_routing own = p;
  asm("mapa.u64 %0, %1, 0;" : "=l"(own.logits) : "l"(static_cast<float*>(token.logits)));  // of the first block
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = int64_t(threadIdx.x + i * kRouteThreads) * kVector;
    if (at >= p.hidden) continue;
    if (norm.weight_is_bf16) load_vector(static_cast<const __nv_bfloat16*>(norm.weight) + at, scale[i]);
    else load_vector(static_cast<const float*>(norm.weight) + at, scale[i]);
  }
  cluster_sync();  // it has begun
  wait_for_previous_kernel();
  if constexpr (kVectors > 0) {
    norm_row<kVectors>(p, norm, scale, line, totals);
    own.x = line;
  }
  if (warp < scores) {
    const float sum = row.times(router + warp * p.hidden, static_cast<const __nv_bfloat16*>(own.x), p.hidden, lane);
    if (lane == 0) own.logits[warp] = p.bias ? __fadd_rn(sum, p.bias[warp]) : sum;
  }
  for (int score = warp + warps; score < scores; score += warps) sum_logits<Weight, 1>(own, score, 0, lane);
  cluster_sync();
  if (blockIdx.x != 0) return;
  if (p.choice_bias && p.chosen_groups < p.groups) {
    if (warp != 0) return;
    own.logits = token.logits, own.weights = token.weights, own.experts = token.experts;
    choose_experts<kPerLane>(own, 0, lane);
  } else {
    rank_experts<kPerLane>(p, token);
    if (warp != 0) return;
  }
  __syncwarp();
  for (int i = lane; i < p.chosen + p.has_shared; i += kWarp) p.weights[i] = token.weights[i];
  for (int rank = lane; rank < p.chosen; rank += kWarp) {
    int32_t* const item = p.plan + p.chosen + 3 * rank;
    p.experts[rank] = token.experts[rank], p.plan[rank] = rank;
    item[0] = token.experts[rank], item[1] = rank, item[2] = 1;
  }
  __threadfence();
#endif
}

template <class Weight, int kTokens>
const char* launch_logits(const mlspec_cuda_routing& p, const mlspec_cuda_row_launch& how) {
  const unsigned across = blocks_for(p.num_experts + p.has_shared, kLogitWarps), along = blocks_for(p.num_tokens, kTokens);
  if (along > 65535) return "too many tokens for one launch: call it for fewer tokens";
  return launch_rows(how, RowGrid{dim3(across, along), kLogitWarps * kWarp}, logits_kernel<Weight, kTokens>, p);
}

template <class Weight>
const char* launch_logits(const mlspec_cuda_routing& p, const mlspec_cuda_row_launch& how) {
  if (p.num_tokens == 1) return launch_logits<Weight, 1>(p, how);
  return p.num_tokens < 64 ? launch_logits<Weight, 4>(p, how) : launch_logits<Weight, 8>(p, how);
}

template <class Weight, int kPerLane>
const char* launch_route(const mlspec_cuda_routing& p, const mlspec_cuda_row_launch& how) {
  const int64_t pairs = p.num_tokens * p.chosen;
  const int rows = int(mlspec_cuda_rows_of_item(pairs, p.num_experts)), items = int(mlspec_cuda_most_items(pairs, p.num_experts));
  if constexpr (kPerLane <= kRoutePerLane) {
    const RowGrid cluster{dim3(kRouteBlocks), kRouteThreads, 0, kRouteBlocks};
    if (how.clusters && p.num_tokens == 1)
      return launch_rows(how, cluster, route_token_kernel<Weight, kPerLane, 0>, p, mlspec_cuda_route_norm{});
  }
  if (const char* problem = launch_logits<Weight>(p, how)) return problem;
  if (p.num_tokens <= kPlanThreads / kWarp)
    return launch_rows(how, RowGrid{dim3(1), kPlanThreads}, plan_kernel<kPerLane>, p, rows, items);
  const RowGrid grid{dim3(blocks_for(p.num_tokens, kChooseWarps)), kChooseWarps * kWarp};
  if (const char* problem = launch_rows(how, grid, choose_kernel<kPerLane>, p)) return problem;
  return launch_rows(how, RowGrid{dim3(1), kPlanThreads}, plan_kernel<0>, p, rows, items);
}

template <class Weight, int kPerLane>
const char* launch_normed(const mlspec_cuda_routing& p, const mlspec_cuda_route_norm& norm, const mlspec_cuda_row_launch& how) {
  const RowGrid cluster{dim3(kRouteBlocks), kRouteThreads, 0, kRouteBlocks};
  if (p.hidden <= kRouteThreads * kVector) return launch_rows(how, cluster, route_token_kernel<Weight, kPerLane, 1>, p, norm);
  return launch_rows(how, cluster, route_token_kernel<Weight, kPerLane, 2>, p, norm);
}

template <class Weight>
const char* route_normed(const mlspec_cuda_routing& p, const mlspec_cuda_route_norm& norm, const mlspec_cuda_row_launch& how) {
  static_assert(MLSPEC_CUDA_MOST_ROUTED == 2 * kRouteThreads * kVector, "a thread has up to two vectors");
  if (!how.clusters || p.num_tokens != 1 || p.num_experts > kRoutePerLane * kWarp || p.hidden > MLSPEC_CUDA_MOST_ROUTED)
    return "one cluster norms and routes one token of up to 8192 columns to up to 256 experts";
  return p.num_experts <= 4 * kWarp ? launch_normed<Weight, 4>(p, norm, how) : launch_normed<Weight, kRoutePerLane>(p, norm, how);
}

template <class Weight>
const char* route(const mlspec_cuda_routing& p, const mlspec_cuda_row_launch& how) {
  if (p.num_experts <= 4 * kWarp) return launch_route<Weight, 4>(p, how);
  if (p.num_experts <= kRoutePerLane * kWarp) return launch_route<Weight, kRoutePerLane>(p, how);
  return launch_route<Weight, MLSPEC_CUDA_MOST_EXPERTS / kWarp>(p, how);
}

const char* problem_of(const mlspec_cuda_routing& p) {
  static_assert(kPlanThreads == MLSPEC_CUDA_MOST_EXPERTS, "a thread an expert");
  if (p.num_tokens < 1 || p.hidden < 1 || p.hidden % kVector) return "routing takes a token or more, of a multiple of 8 elements";
  if (p.num_experts < 1 || p.num_experts > MLSPEC_CUDA_MOST_EXPERTS || p.chosen < 1 || p.chosen > p.num_experts)
    return "routing takes 1 to 1024 experts, and a token goes to 1 or more of them";
  if (p.choice_bias && (p.groups < 1 || p.groups > MLSPEC_CUDA_MOST_GROUPS || p.num_experts % p.groups || p.chosen_groups < 1 ||
                        p.chosen_groups > p.groups || (p.chosen_groups < p.groups && p.num_experts < 2 * p.groups) ||
                        p.chosen > p.num_experts / p.groups * p.chosen_groups))
    return "routing by sigmoids takes 1 to 64 equal groups of experts, of which those looked at hold as many as a token goes to";
  return p.num_tokens * p.chosen > INT32_MAX / 4 ? "too many tokens for one launch: call it for fewer tokens" : nullptr;
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_route_normed_row(const mlspec_cuda_routing* routing, const mlspec_cuda_route_norm* norm,
                                                    const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  const mlspec_cuda_routing& p = *routing;
  if (const char* problem = problem_of(p)) return problem;
  return p.router_is_float32 ? route_normed<float>(p, *norm, *how) : route_normed<__nv_bfloat16>(p, *norm, *how);
}

extern "C" const char* mlspec_cuda_route_rows(const mlspec_cuda_routing* routing, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  const mlspec_cuda_routing& p = *routing;
  if (const char* problem = problem_of(p)) return problem;
  return p.router_is_float32 ? route<float>(p, *how) : route<__nv_bfloat16>(p, *how);
}

extern "C" const char* mlspec_cuda_plan_rows(const mlspec_cuda_routing* routing, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  const mlspec_cuda_routing& p = *routing;
  if (p.num_tokens < 1 || p.chosen < 1 || p.num_experts < 1 || p.num_experts > MLSPEC_CUDA_MOST_EXPERTS)
    return "a plan takes a token or more, which go to one or more of 1 to 1024 experts";
  const int64_t pairs = p.num_tokens * p.chosen;
  if (pairs > INT32_MAX / 4) return "too many tokens for one launch: call it for fewer tokens";
  return launch_rows(*how, RowGrid{dim3(1), kPlanThreads}, plan_kernel<0>, p, int(mlspec_cuda_rows_of_item(pairs, p.num_experts)),
                     int(mlspec_cuda_most_items(pairs, p.num_experts)));
}
