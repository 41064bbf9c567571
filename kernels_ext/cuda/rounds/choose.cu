// Which token does a row of logits give, and how probable is it? One pass: argmax (of logits, or of logits + noise) and softmax sum.
//
// A row is eight parts, each read by the threads of one block, its numbers merged lane by lane, warp by warp and part by part in
// trees that never change. On chips with clusters eight blocks take a part each; on others one block takes them one by one, and every
// sum has the same order.
#include <math_constants.h>

#include "../attention/attention_ptx.cuh"
#include "philox.cuh"
#include "../rows/row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kParts = 8;
constexpr int kChooseThreads = 512, kChooseWarps = kChooseThreads / kWarp;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The same order as floats', of which -0 and 0 are one; NaN does not come here.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(uint32_t bits) {
  return __uint_as_float(bits >> 31 ? bits & 0x7FFFFFFFu : ~bits);
}

// What exponents are taken against. Infinite scores keep theirs: then only a NaN makes the sum NaN.
__device__ __forceinline__ float shift_of(float largest) { return fabsf(largest) == CUDART_INF_F ? 0.f : largest; }

// Of a set of tokens: the best one, and the sum of exp(score - shift_of(largest)), which is NaN where a logit is.
struct alignas(16) Choice {
  float key, score;  // of the best token: what it won by, and its capped logit
  float largest, sum;
  int token;

  __device__ static Choice none() { return {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, 0.f, INT32_MAX}; }

  // For tokens offered in ascending order.
  __device__ __forceinline__ bool loses_to(float other) const { return other > key || token == INT32_MAX; }
};

// The choice among those of a warp's lanes, in every lane; sums in a tree of lanes.
__device__ __forceinline__ Choice choice_of_lanes(const Choice& mine) {
  Choice all;
  const uint32_t key = ordered(mine.key), best = __reduce_max_sync(kAllLanes, key);
  all.key = unordered(best);
  all.token = int(__reduce_min_sync(kAllLanes, key == best ? uint32_t(mine.token) : uint32_t(INT32_MAX)));
  all.score = unordered(__reduce_max_sync(kAllLanes, key == best && mine.token == all.token ? ordered(mine.score) : 0u));
  all.largest = unordered(__reduce_max_sync(kAllLanes, ordered(mine.largest)));
  all.sum = __fmul_rn(mine.sum, __expf(mine.largest - shift_of(all.largest)));
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) all.sum = __fadd_rn(all.sum, __shfl_xor_sync(kAllLanes, all.sum, step));
  return all;
}

struct ChooseArgs {
  int vocab, part;  // part: tokens of one part, a multiple of kVector
  float softcap;
  const int64_t* seed;
  int next_seed;  // 0: one for all rows
  const int32_t *streams, *positions;
  int32_t* tokens;
  float* confidence;
};

template <class T>
__device__ __forceinline__ void load_logits(const ChooseArgs& a, const T* row, int first, int end, float (&logits)[kVector]) {
  if (first < end && a.vocab % kVector == 0) {
    load_vector(row + first, logits);
  } else {
#pragma unroll
    for (int e = 0; e < kVector; ++e) logits[e] = first + e < end ? load_one(row + first + e) : -CUDART_INF_F;
  }
}

// Without noise, which a negative stream has none of, the logit as it came decides: the cap is monotone and only makes ties.
template <bool kNoise>
__device__ __forceinline__ void offer(const Stream& stream, int first, const float (&logits)[kVector],
                                      const float (&scores)[kVector], Choice& mine) {
  if (kNoise && int32_t(stream.stream) >= 0) {
    const uint4 low = philox(stream, first / 4), high = philox(stream, first / 4 + 1);
    const uint32_t words[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const float key = scores[e] + gumbel(words[e]);
      if (mine.loses_to(key)) mine.key = key, mine.score = scores[e], mine.token = first + e;
    }
  } else {
    float most = logits[0];
#pragma unroll
    for (int e = 1; e < kVector; ++e) most = fmaxf(most, logits[e]);
    if (!mine.loses_to(most)) return;
    mine.key = most;
#pragma unroll
    for (int e = kVector - 1; e >= 0; --e)
      if (logits[e] == most) mine.score = scores[e], mine.token = first + e;
  }
}

template <bool kNoise>
constexpr int kBatch = kNoise ? 2 : 4;  // vectors of a thread that are loaded together

// Vectors first, first + stride, ... below end.
template <bool kNoise, class T>
__device__ __forceinline__ void add_batch(const ChooseArgs& a, const T* row, const Stream& stream, int first, int end,
                                          Choice& mine) {
  constexpr int kStride = kChooseThreads * kVector;
  float scores[kBatch<kNoise>][kVector], most = mine.largest;
#pragma unroll
  for (int b = 0; b < kBatch<kNoise>; ++b) load_logits(a, row, first + b * kStride, end, scores[b]);
#pragma unroll
  for (int b = 0; b < kBatch<kNoise>; ++b) {
    const int at = first + b * kStride;
    if (at >= end) break;
    float logits[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      logits[e] = scores[b][e];
      if (a.softcap > 0.f && at + e < a.vocab) scores[b][e] = tanhf(logits[e] / a.softcap) * a.softcap;
      most = fmaxf(most, scores[b][e]);
    }
    offer<kNoise>(stream, at, logits, scores[b], mine);
  }
  const float shift = shift_of(most);
  mine.sum = __fmul_rn(mine.sum, __expf(mine.largest - shift));
  mine.largest = most;
#pragma unroll
  for (int b = 0; b < kBatch<kNoise>; ++b) {
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum = __fadd_rn(sum, __expf(scores[b][e] - shift));
    mine.sum = __fadd_rn(mine.sum, sum);
  }
}

// The choice among tokens [first, end), in every thread of warp 0.
template <bool kNoise, class T>
__device__ __forceinline__ Choice choose_part(const ChooseArgs& a, const T* row, const Stream& stream, int first, int end,
                                              Choice (&warps)[kChooseWarps]) {
  Choice mine = Choice::none();
  for (int at = first + int(threadIdx.x) * kVector; at < end; at += kBatch<kNoise> * kChooseThreads * kVector)
    add_batch<kNoise>(a, row, stream, at, end, mine);
  mine = choice_of_lanes(mine);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x < kWarp) mine = choice_of_lanes(threadIdx.x < kChooseWarps ? warps[threadIdx.x] : Choice::none());
  return mine;
}

// By warp 0.
__device__ __forceinline__ void write_choice(const ChooseArgs& a, int64_t row, const Choice (&parts)[kParts]) {
  const Choice c = choice_of_lanes(threadIdx.x < kParts ? parts[threadIdx.x] : Choice::none());
  if (threadIdx.x > 0) return;
  const bool has_nan = c.sum != c.sum;
  a.tokens[row] = has_nan ? -1 : c.token;
  a.confidence[row] = has_nan ? CUDART_NAN_F : expf(c.score - c.largest) / c.sum;
}

template <bool kNoise>
__device__ __forceinline__ Stream stream_of(const ChooseArgs& a, int64_t row) {
  if constexpr (!kNoise) return {};
  const uint64_t seed = uint64_t(a.seed[row * a.next_seed]);
  return {uint32_t(seed), uint32_t(seed >> 32), uint32_t(a.positions[row]), uint32_t(a.streams[row])};
}

// kCluster: eight blocks a row, block by block one part; else one block a row.
template <bool kNoise, bool kCluster, class T>
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const ChooseArgs a, const T* logits) {
  __shared__ Choice warps[kChooseWarps], parts[kParts];
  launch_dependents();
  if constexpr (kCluster) cluster_arrive();
  wait_for_previous_kernel();
  const int64_t row = kCluster ? blockIdx.x / kParts : blockIdx.x;
  const T* from = logits + row * a.vocab;
  const Stream stream = stream_of<kNoise>(a, row);
  const auto part = [&](int p) {
    return choose_part<kNoise>(a, from, stream, p * a.part, min((p + 1) * a.part, a.vocab), warps);
  };
  if constexpr (kCluster) {
    const int rank = blockIdx.x % kParts;
    const Choice mine = part(rank);
    cluster_wait();  // the first block runs: it may be written to
    if (threadIdx.x == 0) {
      const uint32_t to = shared_address(parts + rank);
      store_cluster(to, 0, make_float4(mine.key, mine.score, mine.largest, mine.sum));
      store_cluster(to + 16, 0, make_float2(__int_as_float(mine.token), 0.f));
    }
    cluster_arrive();
    cluster_wait();
    if (rank == 0 && threadIdx.x < kWarp) write_choice(a, row, parts);
  } else {
    for (int p = 0; p < kParts; ++p) {
      const Choice mine = part(p);
      if (threadIdx.x == 0) parts[p] = mine;
      __syncthreads();  // warps[] was read, parts[] is there
    }
    if (threadIdx.x < kWarp) write_choice(a, row, parts);
  }
}

template <bool kNoise, class T>
const char* choose(const ChooseArgs& args, const void* logits, int64_t n, const mlspec_cuda_row_launch& how) {
  const T* from = static_cast<const T*>(logits);
  if (how.clusters)
    return launch_rows(how, {dim3(unsigned(n * kParts)), kChooseThreads, 0, kParts}, choose_kernel<kNoise, true, T>, args, from);
  return launch_rows(how, {dim3(unsigned(n)), kChooseThreads}, choose_kernel<kNoise, false, T>, args, from);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_choose_rows(const mlspec_cuda_choice* c, const mlspec_cuda_row_launch* how) {
  if (c->vocab > INT32_MAX / 2 || c->n > INT32_MAX / kParts) return "choose_rows takes up to 2^30 tokens and 2^28 rows";
  const int64_t part = (c->vocab + kParts * kVector - 1) / (kParts * kVector) * kVector;
  const int next_seed = c->seeds > 1 ? 1 : 0;
  const ChooseArgs args{int(c->vocab), int(part), c->softcap, c->seed, next_seed, c->streams, c->positions, c->tokens, c->confidence};
  if (c->logits_are_bf16)
    return c->seed ? choose<true, __nv_bfloat16>(args, c->logits, c->n, *how) : choose<false, __nv_bfloat16>(args, c->logits, c->n, *how);
  return c->seed ? choose<true, float>(args, c->logits, c->n, *how) : choose<false, float>(args, c->logits, c->n, *how);
}
