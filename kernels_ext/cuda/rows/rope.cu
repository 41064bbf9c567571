// How do the heads of a step get their norms, their rotation and their place in the cache? One warp a head and token.
#include <type_traits>

#include "row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kRopeWarps = 4;  // of a block: small blocks spread a single token's heads over the chip
constexpr int kMaxDim = 256;
constexpr float kLeastReach = 0x1p-100f;  // LEAST of hf_mlspec/formats/cache/record.py

struct RopeArgs {
  const __nv_bfloat16* qkv;
  const float *q_norm, *k_norm, *cos, *sin;
  __nv_bfloat16* q;
  mlspec_cuda_tokens tokens;
  mlspec_cuda_cache cache;
  int64_t positions;
  int half, heads;
  float eps;
};

// What lane `lane` of a warp holds of a head: elements i, i + 1 .. i + kStep of the first half of the rotated part and their
// partners in the second half, and of the part behind, which is not rotated.
template <int kStep>
struct HeadPart {
  static constexpr int kPairs = kMaxDim / 2 / (kWarp * kStep), kRest = kMaxDim / (kWarp * kStep);
  float first[kPairs][kStep], second[kPairs][kStep], rest[kRest][kStep];

  __device__ static void load_some(const __nv_bfloat16* from, float (&v)[kStep]) {
    if constexpr (kStep == 2) {
      const float2 pair = widened(*reinterpret_cast<const uint32_t*>(from));
      v[0] = pair.x, v[1] = pair.y;
    } else {
      v[0] = load_one(from);
    }
  }

  __device__ static void store_some(__nv_bfloat16* to, const float (&v)[kStep]) {
    if constexpr (kStep == 2) {
      *reinterpret_cast<uint32_t*>(to) = narrowed(v[0], v[1]);
    } else {
      store_one(to, v[0]);
    }
  }

  // f(element of the head, values) for everything this lane holds.
  template <class F>
  __device__ __forceinline__ void for_each(int lane, int half, int dim, F f) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = (lane + j * kWarp) * kStep;
      if (i >= half) break;
      f(i, first[j]);
      f(half + i, second[j]);
    }
#pragma unroll
    for (int j = 0; j < kRest; ++j) {
      const int i = 2 * half + (lane + j * kWarp) * kStep;
      if (i >= dim) break;
      f(i, rest[j]);
    }
  }

  __device__ __forceinline__ void normalize(int lane, int half, int dim, const float* weight, float eps) {
    float sum = 0.f;
    for_each(lane, half, dim, [&](int, float (&v)[kStep]) {
      for (int e = 0; e < kStep; ++e) sum = fmaf(v[e], v[e], sum);
    });
    const float inverse = rsqrtf(warp_sum(sum) / float(dim) + eps);
    for_each(lane, half, dim, [&](int at, float (&v)[kStep]) {
      for (int e = 0; e < kStep; ++e) v[e] = rounded(v[e] * inverse * weight[at + e]);
    });
  }

  // Codes and scale of hf_mlspec/formats/cache/int8.py, bit for bit. to: int8 [dim + 4], at a multiple of 4 bytes.
  __device__ __forceinline__ void store_int8(int lane, int half, int dim, int8_t* to) {
    constexpr uint32_t kInfinite = 0x7F800000;
    uint32_t most = 0;  // of magnitudes as bits: what is not finite is larger than all that is
    for_each(lane, half, dim, [&](int, float (&v)[kStep]) {
      for (int e = 0; e < kStep; ++e) most = max(most, __float_as_uint(v[e]) & 0x7FFFFFFF);
    });
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    const float largest = most < kInfinite ? rounded(__uint_as_float(most)) : __uint_as_float(kInfinite);
    const bool finite = __float_as_uint(largest) < kInfinite, coded = finite && largest >= kLeastReach;
    const float factor = coded ? __fdiv_rn(127.f, largest) : 0.f;
    if (lane == 0)
      *reinterpret_cast<float*>(to + dim) = coded ? __fdiv_rn(largest, 127.f) : finite ? 0.f : __uint_as_float(0x7FC00000);
    for_each(lane, half, dim, [&](int at, float (&v)[kStep]) {
      int8_t codes[kStep];
      for (int e = 0; e < kStep; ++e) codes[e] = coded ? int8_t(__float2int_rn(__fmul_rn(v[e], factor))) : int8_t(0);
      if constexpr (kStep == 2)
        *reinterpret_cast<char2*>(to + at) = make_char2(codes[0], codes[1]);
      else
        to[at] = codes[0];
    });
  }

  // Codes and ends of hf_mlspec/formats/cache/int4.py, bit for bit. to: [dim / 2 + 4] bytes, at a multiple of 4. single: shared,
  // [dim], of the warp; used where a lane does not hold both codes of a byte.
  __device__ __forceinline__ void store_int4(int lane, int half, int dim, uint8_t* to, uint8_t* single) {
    float low = 0.f, high = 0.f;
    bool finite = true;
    for_each(lane, half, dim, [&](int, float (&v)[kStep]) {
      for (int e = 0; e < kStep; ++e) {
        low = fminf(low, v[e]), high = fmaxf(high, v[e]);
        finite = finite && isfinite(v[e]);
      }
    });
    for (int step = kWarp / 2; step > 0; step /= 2) {
      low = fminf(low, __shfl_xor_sync(0xFFFFFFFFu, low, step));
      high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFu, high, step));
    }
    low = end_of(low), high = end_of(high);
    const float distance = __fsub_rn(high, low);
    finite = __all_sync(0xFFFFFFFFu, finite) && distance < 0x1p120f;
    const bool coded = finite && distance > 0.f;
    const float factor = coded ? __fdiv_rn(15.f, distance) : 0.f;
    if (lane == 0) *reinterpret_cast<uint32_t*>(to + dim / 2) = finite ? narrowed(low, high) : 0x7FC07FC0u;
    for_each(lane, half, dim, [&](int at, float (&v)[kStep]) {
      uint32_t codes[kStep];
      for (int e = 0; e < kStep; ++e)
        codes[e] = coded ? uint32_t(__float2int_rn(__fmul_rn(__fsub_rn(fminf(fmaxf(v[e], low), high), low), factor))) : 0;
      if constexpr (kStep == 2)
        to[at / 2] = uint8_t(codes[0] | codes[1] << 4);
      else
        single[at] = uint8_t(codes[0]);
    });
    if constexpr (kStep == 1) {
      __syncwarp();
      for (int i = lane; i < dim / 2; i += kWarp) to[i] = uint8_t(single[2 * i] | single[2 * i + 1] << 4);
    }
  }

  // As a bfloat16; what is too small is 0.
  __device__ __forceinline__ static float end_of(float reach) {
    const float end = rounded(reach);
    return fabsf(end) < kLeastReach ? 0.f : end;
  }

  __device__ __forceinline__ void rotate(int lane, int half, const float* cos, const float* sin) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = (lane + j * kWarp) * kStep;
      if (i >= half) break;
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const float a = first[j][e], b = second[j][e], c = cos[i + e], s = sin[i + e];
        first[j][e] = a * c - b * s;
        second[j][e] = b * c + a * s;
      }
    }
  }
};

template <int kStep, int kBits>
__global__ void __launch_bounds__(kRopeWarps* kWarp) rope_write_kernel(const RopeArgs a) {
  launch_dependents();
  const int kv_heads = int(a.cache.kv_heads), dim = int(a.cache.dim), all_heads = a.heads + 2 * kv_heads;
  const int lane = threadIdx.x % kWarp, width = int(a.tokens.width);
  const int64_t index = int64_t(blockIdx.x) * kRopeWarps + threadIdx.x / kWarp;
  const unsigned token = unsigned(index) / unsigned(all_heads);
  if (token >= unsigned(a.cache.batch) * unsigned(width)) return;
  const int head = int(unsigned(index) % unsigned(all_heads));
  const int kv = head < a.heads + kv_heads ? head - a.heads : head - a.heads - kv_heads;
  const int row = int(token / unsigned(width)), t = int(token % unsigned(width));
  const bool is_query = head < a.heads, is_value = head >= a.heads + kv_heads;
  __shared__ uint8_t single[kBits == 4 && kStep == 1 ? kRopeWarps : 1][kMaxDim];
  HeadPart<kStep> part{};
  wait_for_previous_kernel();
  const int64_t position = int64_t(a.tokens.starts[row]) + t;
  const bool real = t < a.tokens.counts[row] && position >= 0 && position < a.cache.slots && position < a.positions;
  const __nv_bfloat16* from = a.qkv + index * dim;  // read before it is known to be real: one wait less
  part.for_each(lane, a.half, dim, [&](int at, float (&v)[kStep]) { HeadPart<kStep>::load_some(from + at, v); });
  if (real) {
    const float* norm = is_query ? a.q_norm : is_value ? nullptr : a.k_norm;
    if (norm) part.normalize(lane, a.half, dim, norm, a.eps);
    if (!is_value) part.rotate(lane, a.half, a.cos + position * a.half, a.sin + position * a.half);
  }
  if (!real) part = {};
  const auto store = [&](__nv_bfloat16* to) {
    part.for_each(lane, a.half, dim, [&](int at, float (&v)[kStep]) { HeadPart<kStep>::store_some(to + at, v); });
  };
  if (is_query) return store(a.q + (int64_t(token) * a.heads + head) * dim);  // zeros for padding
  if (!real) return;
  using Element = std::conditional_t<kBits != 0, int8_t, __nv_bfloat16>;
  const int64_t at = is_value ? row * a.cache.value_batch_stride + kv * a.cache.value_head_stride
                              : row * a.cache.key_batch_stride + kv * a.cache.key_head_stride;
  Element* const lane_of_head = static_cast<Element*>(is_value ? a.cache.values : a.cache.keys) + at;
  if constexpr (kBits == 4)
    part.store_int4(lane, a.half, dim, reinterpret_cast<uint8_t*>(lane_of_head + position * (dim / 2 + kTailBytes)),
                    single[kStep == 1 ? threadIdx.x / kWarp : 0]);
  else if constexpr (kBits == 8)
    part.store_int8(lane, a.half, dim, lane_of_head + position * (dim + kTailBytes));
  else
    store(lane_of_head + position * dim);
}

template <int kStep>
const char* launch_rope(const RopeArgs& args, const RowGrid& grid, const mlspec_cuda_row_launch& how) {
  if (args.cache.code_bits == 4) return launch_rows(how, grid, rope_write_kernel<kStep, 4>, args);
  return args.cache.code_bits == 8 ? launch_rows(how, grid, rope_write_kernel<kStep, 8>, args)
                                   : launch_rows(how, grid, rope_write_kernel<kStep, 0>, args);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_rope_write_rows(const mlspec_cuda_rotation* rotation, const mlspec_cuda_tokens* tokens,
                                        const mlspec_cuda_cache* cache, const mlspec_cuda_row_launch* how) {
  if (cache->dim % 16 || cache->dim < 16 || cache->dim > kMaxDim) return "head_dim must be a multiple of 16 up to 256";
  const RopeArgs args{static_cast<const __nv_bfloat16*>(rotation->qkv), rotation->q_norm, rotation->k_norm, rotation->cos,
                      rotation->sin, static_cast<__nv_bfloat16*>(rotation->q), *tokens, *cache, rotation->positions,
                      int(rotation->half), int(rotation->heads), rotation->eps};
  const int64_t heads = cache->batch * tokens->width * (rotation->heads + 2 * cache->kv_heads);
  if (heads > INT32_MAX - kRopeWarps) return "a call takes up to 2^31 - 5 heads of all tokens";
  const RowGrid grid{dim3(blocks_for(heads, kRopeWarps)), kRopeWarps * kWarp};
  return args.half % 2 ? launch_rope<1>(args, grid, *how) : launch_rope<2>(args, grid, *how);
}
