// Which token does a row of logits give, and how probable is it? One pass: argmax (of logits, or of logits + noise) and softmax sum.
//
// A row is eight parts, each read by the threads of one block, its numbers merged in a tree of threads and then part by part in
// ascending order. On chips with clusters eight blocks take a part each; on others one block takes them one by one, and every
// sum has the same order.
#include <math_constants.h>

#include "philox.cuh"
#include "row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kParts = 8;
constexpr int kChooseThreads = 512, kChooseWarps = kChooseThreads / kWarp;

// Of a set of tokens: the best one, and the sum of exp(score - largest).
struct alignas(16) Choice {
  float key, score;  // of the best token: what it won by, and its capped logit
  float largest, sum;
  int token, has_nan;

  __device__ static Choice none() { return {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, 0.f, INT32_MAX, 0}; }

  __device__ __forceinline__ void offer(float other_key, float other_score, int other_token) {
    const bool better = other_key > key || (other_key == key && other_token < token);
    key = better ? other_key : key;
    score = better ? other_score : score;
    token = better ? other_token : token;
  }

  // Both sums brought to the larger of the two maxima.
  __device__ __forceinline__ void merge(const Choice& other) {
    offer(other.key, other.score, other.token);
    const float most = fmaxf(largest, other.largest), shift = most == -CUDART_INF_F ? 0.f : most;
    sum = __fadd_rn(__fmul_rn(sum, expf(largest - shift)), __fmul_rn(other.sum, expf(other.largest - shift)));
    largest = most;
    has_nan |= other.has_nan;
  }

  __device__ __forceinline__ Choice of_lane(int step) const {
    constexpr unsigned kAll = 0xFFFFFFFFu;
    return {__shfl_xor_sync(kAll, key, step),     __shfl_xor_sync(kAll, score, step), __shfl_xor_sync(kAll, largest, step),
            __shfl_xor_sync(kAll, sum, step), __shfl_xor_sync(kAll, token, step), __shfl_xor_sync(kAll, has_nan, step)};
  }
};

struct ChooseArgs {
  int vocab, part;  // part: tokens of one part, a multiple of kVector
  float softcap;
  const int64_t* seed;
  const int32_t *streams, *positions;
  int32_t* tokens;
  float* confidence;
};

template <bool kNoise>
__device__ __forceinline__ void add_tokens(const ChooseArgs& a, const Stream& stream, int first, const float (&logits)[kVector],
                                           Choice& mine) {
  float scores[kVector], noise[kVector] = {};
  if constexpr (kNoise) {
    const uint4 low = philox(stream, first / 4), high = philox(stream, first / 4 + 1);
    const uint32_t words[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int e = 0; e < kVector; ++e) noise[e] = gumbel(words[e]);
  }
  float most = mine.largest;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const bool exists = first + e < a.vocab;
    scores[e] = a.softcap > 0.f && exists ? tanhf(logits[e] / a.softcap) * a.softcap : logits[e];
    mine.has_nan |= logits[e] != logits[e];
    // Without noise the logit as it came decides: the cap is monotone and only makes ties.
    if (exists) mine.offer(kNoise ? scores[e] + noise[e] : logits[e], scores[e], first + e);
    most = fmaxf(most, scores[e]);
  }
  const float shift = most == -CUDART_INF_F ? 0.f : most;
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < kVector; ++e) sum = __fadd_rn(sum, expf(scores[e] - shift));
  mine.sum = __fadd_rn(__fmul_rn(mine.sum, expf(mine.largest - shift)), sum);
  mine.largest = most;
}

// The choice among tokens [first, end), in every thread of warp 0.
template <bool kNoise, class T>
__device__ __forceinline__ Choice choose_part(const ChooseArgs& a, const T* row, const Stream& stream, int first, int end,
                                              Choice (&warps)[kChooseWarps]) {
  Choice mine = Choice::none();
  const bool aligned = a.vocab % kVector == 0;
  for (int at = first + int(threadIdx.x) * kVector; at < end; at += kChooseThreads * kVector) {
    float logits[kVector];
    if (aligned) {
      load_vector(row + at, logits);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) logits[e] = at + e < a.vocab ? load_one(row + at + e) : -CUDART_INF_F;
    }
    add_tokens<kNoise>(a, stream, at, logits, mine);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) mine.merge(mine.of_lane(step));
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    mine = threadIdx.x < kChooseWarps ? warps[threadIdx.x] : Choice::none();
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) mine.merge(mine.of_lane(step));
  }
  return mine;
}

__device__ __forceinline__ void write_choice(const ChooseArgs& a, int64_t row, const Choice& c) {
  a.tokens[row] = c.has_nan ? -1 : c.token;
  a.confidence[row] = c.has_nan ? CUDART_NAN_F : expf(c.score - c.largest) / c.sum;
}

template <bool kNoise>
__device__ __forceinline__ Stream stream_of(const ChooseArgs& a, int64_t row) {
  if constexpr (!kNoise) return {};
  const uint64_t seed = uint64_t(*a.seed);
  return {uint32_t(seed), uint32_t(seed >> 32), uint32_t(a.positions[row]), uint32_t(a.streams[row])};
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ Choice choice_of_rank(const Choice& own, uint32_t rank) {
  const uint32_t address = shared_address(&own);
  const float4 a = load_cluster(address, rank), b = load_cluster(address + 16, rank);
  return {a.x, a.y, a.z, a.w, __float_as_int(b.x), __float_as_int(b.y)};
}
#endif

// kCluster: eight blocks a row, block by block one part; else one block a row.
template <bool kNoise, bool kCluster, class T>
__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const ChooseArgs a, const T* logits) {
  __shared__ Choice warps[kChooseWarps];
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t row = kCluster ? blockIdx.x / kParts : blockIdx.x;
  const T* from = logits + row * a.vocab;
  const Stream stream = stream_of<kNoise>(a, row);
  const auto part = [&](int p) {
    return choose_part<kNoise>(a, from, stream, p * a.part, min((p + 1) * a.part, a.vocab), warps);
  };
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (kCluster) {
    __shared__ Choice shown;  // of this block's part
    const int rank = blockIdx.x % kParts;
    const Choice mine = part(rank);
    if (threadIdx.x == 0) shown = mine;
    cluster_sync();
    if (rank == 0 && threadIdx.x == 0) {
      Choice parts[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) parts[p] = choice_of_rank(shown, p);
#pragma unroll
      for (int p = 1; p < kParts; ++p) parts[0].merge(parts[p]);
      write_choice(a, row, parts[0]);
    }
    cluster_exit();
    return;
  }
#endif
  Choice all = part(0);
  for (int p = 1; p < kParts; ++p) {
    __syncthreads();  // warps[] was read
    all.merge(part(p));
  }
  if (threadIdx.x == 0) write_choice(a, row, all);
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

const char* mlspec_cuda_choose_rows_staged(const mlspec_cuda_choice* c, const mlspec_cuda_row_launch* how) {
  if (c->vocab > INT32_MAX / 2 || c->n > INT32_MAX / kParts) return "choose_rows takes up to 2^30 tokens and 2^28 rows";
  const int64_t part = (c->vocab + kParts * kVector - 1) / (kParts * kVector) * kVector;
  const ChooseArgs args{int(c->vocab), int(part), c->softcap, c->seed, c->streams, c->positions, c->tokens, c->confidence};
  if (c->logits_are_bf16)
    return c->seed ? choose<true, __nv_bfloat16>(args, c->logits, c->n, *how) : choose<false, __nv_bfloat16>(args, c->logits, c->n, *how);
  return c->seed ? choose<true, float>(args, c->logits, c->n, *how) : choose<false, float>(args, c->logits, c->n, *how);
}
