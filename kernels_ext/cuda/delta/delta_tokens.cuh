// Which tokens of a row does a call run, and what does a head read of each? The convolution's outputs, lengths, decay and beta.
#pragma once
#include "../rows/row_launch.cuh"
#include "delta.h"

namespace mlspec {

constexpr int kUnits = 4;      // warps of a block: heads of a token
constexpr int kMostParts = 8;  // elements of a head that a lane has: 256 / 32

// Tokens [begin, start) of a row were run before and are run again, from a state of `begin` tokens; those up to `end` are the call's.
struct DeltaSpan {
  int begin, start, end;
  bool lost;  // there is no state from which they could be run: what comes out is NaN
};

__device__ __forceinline__ DeltaSpan span_of(const mlspec_cuda_delta& a, int row) {
  const int start = a.starts[row], count = min(a.counts[row], a.width), mark = a.marks[row];
  if (count <= 0) return {0, 0, 0, false};
  const bool lost = start < 0 || (start > 0 && (mark > start || mark < 0 || start - mark + a.num_taps - 1 > a.window));
  return {lost ? start : start == 0 ? 0 : mark, start, start + count, lost};
}

__host__ __device__ __forceinline__ int channels_of(const mlspec_cuda_delta& a) {
  return 2 * a.key_heads * a.key_dim + a.value_heads * a.value_dim;
}

// Where a token of qkvz has what, in elements.
struct TokenPlaces {
  int width, channels, gates, steps;  // of the whole token; the first channel, gate and time step
  int q, k, v;                        // among channels
};

__device__ __forceinline__ TokenPlaces places_of(const mlspec_cuda_delta& a) {
  const int keys = a.key_heads * a.key_dim, values = a.value_heads * a.value_dim, channels = 2 * keys + values;
  if (a.skip) return {values + channels + a.value_heads, values, 0, values + channels, values + keys, values, 0};
  return {channels + values, 0, channels, 0, 0, keys, 2 * keys};
}

// What was computed of token p of a row, from `at` on: of this call, or kept.
__device__ __forceinline__ const __nv_bfloat16* channels_at(const mlspec_cuda_delta& a, int row, const DeltaSpan& span, int p) {
  const int channels = channels_of(a);
  const TokenPlaces at = places_of(a);
  if (p >= span.start)
    return static_cast<const __nv_bfloat16*>(a.qkvz) + (int64_t(row) * a.width + p - span.start) * at.width + at.channels;
  return static_cast<const __nv_bfloat16*>(a.inputs) + (int64_t(row) * a.window + p % a.window) * (channels + 2 * a.value_heads);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Whether four elements of a head that lie side by side can be read at once, wherever a token lies; what is computed is the same.
__device__ __forceinline__ bool reads_fours(const mlspec_cuda_delta& a) {
  const uintptr_t bases = reinterpret_cast<uintptr_t>(a.qkvz) | reinterpret_cast<uintptr_t>(a.inputs);
  return bases % 8 == 0 && (places_of(a).width | (channels_of(a) + 2 * a.value_heads)) % 4 == 0;
}

// A lane has elements 4 (lane + 32 part) + 0 .. 3 of a head.
__device__ __forceinline__ int first_of(int part, int lane) { return 4 * (lane + part * kWarp); }

__device__ __forceinline__ float4 read_four(const __nv_bfloat16* from, bool at_once) {
  if (!at_once)
    return make_float4(__bfloat162float(from[0]), __bfloat162float(from[1]), __bfloat162float(from[2]), __bfloat162float(from[3]));
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  const float2 low = widened(words.x), high = widened(words.y);
  return make_float4(low.x, low.y, high.x, high.y);
}

// silu of the convolution of channels [at, at + n) at token p.
__device__ __forceinline__ void convolve(const mlspec_cuda_delta& a, int row, const DeltaSpan& span, int p, int at, int n, int lane,
                                         bool fours, float (&to)[kMostParts]) {
#pragma unroll
  for (int i = 0; i < kMostParts; ++i) {
    const int element = first_of(i / 4, lane) + i % 4;
    to[i] = a.bias && element < n ? a.bias[at + element] : 0.f;
  }
  const int channels = channels_of(a);
  for (int tap = 0; tap < a.num_taps; ++tap) {
    const int token = p - (a.num_taps - 1) + tap;
    if (token < 0) continue;
    const __nv_bfloat16* const from = channels_at(a, row, span, token) + at;
    const float* const taps = a.taps + int64_t(tap) * channels + at;
#pragma unroll
    for (int part = 0; part < kMostParts / 4; ++part) {
      const int i = first_of(part, lane);
      if (i >= n) continue;
      const float4 x = read_four(from + i, fours);
      const float w[4] = {taps[i], taps[i + 1], taps[i + 2], taps[i + 3]};
      to[4 * part] = fmaf(x.x, w[0], to[4 * part]), to[4 * part + 1] = fmaf(x.y, w[1], to[4 * part + 1]);
      to[4 * part + 2] = fmaf(x.z, w[2], to[4 * part + 2]), to[4 * part + 3] = fmaf(x.w, w[3], to[4 * part + 3]);
    }
  }
#pragma unroll
  for (int i = 0; i < kMostParts; ++i) to[i] *= sigmoid(to[i]);
}

// The elements of a head that a lane has, to where all of them go.
__device__ __forceinline__ void write_head(const float (&from)[kMostParts], int n, int lane, float* to) {
#pragma unroll
  for (int part = 0; part < kMostParts / 4; ++part) {
    const int i = first_of(part, lane);
    if (i < n) *reinterpret_cast<float4*>(to + i) = make_float4(from[4 * part], from[4 * part + 1], from[4 * part + 2], from[4 * part + 3]);
  }
}

__device__ __forceinline__ float warp_dot(const float (&x)[kMostParts], const float (&y)[kMostParts]) {
  float sum = 0.f;
#pragma unroll
  for (int part = 0; part < kMostParts; ++part) sum = fmaf(x[part], y[part], sum);
  return warp_sum(sum);
}

__device__ __forceinline__ void to_length(float (&x)[kMostParts], float length) {
  const float factor = length / sqrtf(warp_dot(x, x) + 1e-6f);
#pragma unroll
  for (int part = 0; part < kMostParts; ++part) x[part] *= factor;
}

// Key and query of a key head, the query only of tokens that something is asked of.
__device__ __forceinline__ void read_keys(const mlspec_cuda_delta& a, int row, const DeltaSpan& span, int p, int64_t slot, int head,
                                          int padded, int lane, bool fours) {
  float k[kMostParts], q[kMostParts];
  const int at = head * a.key_dim;
  const TokenPlaces places = places_of(a);
  convolve(a, row, span, p, places.k + at, a.key_dim, lane, fours, k);
  if (!a.skip) to_length(k, 1.f);
  float* const to = a.keys + (slot * a.key_heads + head) * 2 * padded;
  for (int i = a.key_dim + lane; i < padded; i += kWarp) to[i] = 0.f;
  write_head(k, a.key_dim, lane, to);
  if (p < span.start) return;
  convolve(a, row, span, p, places.q + at, a.key_dim, lane, fours, q);
  if (!a.skip) to_length(q, 1.f / sqrtf(float(a.key_dim)));
  for (int i = a.key_dim + lane; i < padded; i += kWarp) to[padded + i] = 0.f;
  write_head(q, a.key_dim, lane, to + padded);
  const float product = warp_dot(q, k);
  if (lane == 0) a.products[slot * a.key_heads + head] = product;
}

// Values of a head, and by what its state decays and how much of a token it takes.
__device__ __forceinline__ void read_values(const mlspec_cuda_delta& a, int row, const DeltaSpan& span, int p, int64_t slot, int head,
                                            int lane, bool fours) {
  float v[kMostParts];
  convolve(a, row, span, p, places_of(a).v + head * a.value_dim, a.value_dim, lane, fours, v);
  write_head(v, a.value_dim, lane, a.values + (slot * a.value_heads + head) * a.value_dim);
  if (lane != 0) return;
  const __nv_bfloat16* ba = channels_at(a, row, span, p) + channels_of(a);
  float* const weights = a.weights + (slot * a.value_heads + head) * 2;
  if (a.skip) {  // time steps lie behind the channels in either place
    const float x = __bfloat162float(ba[head]) + a.shift[head], step = x > 20.f ? x : log1pf(expf(x));
    weights[0] = expf(a.rate[head] * step), weights[1] = step;
    return;
  }
  if (p >= span.start)
    ba = static_cast<const __nv_bfloat16*>(a.ba) + (int64_t(row) * a.width + p - span.start) * 2 * a.value_heads;
  const float b = __bfloat162float(ba[head]), x = __bfloat162float(ba[a.value_heads + head]) + a.shift[head];
  const float soft = x > 20.f ? x : log1pf(expf(x));
  weights[0] = expf(a.rate[head] * soft), weights[1] = sigmoid(b);
}

// A warp for every head of every token of every row, key heads first.
__global__ void __launch_bounds__(kUnits* kWarp) delta_tokens_kernel(mlspec_cuda_delta a, int padded) {
  launch_dependents();
  wait_for_previous_kernel();
  const int row = blockIdx.z, lane = threadIdx.x % kWarp, unit = blockIdx.x * kUnits + threadIdx.x / kWarp;
  if (unit >= a.key_heads + a.value_heads) return;
  const DeltaSpan span = span_of(a, row);
  const bool fours = reads_fours(a);
  for (int p = span.begin + int(blockIdx.y); p < span.end; p += gridDim.y) {
    const int64_t slot = int64_t(row) * (a.window + a.width) + p - span.begin;
    if (unit < a.key_heads)
      read_keys(a, row, span, p, slot, unit, padded, lane, fours);
    else
      read_values(a, row, span, p, slot, unit - a.key_heads, lane, fours);
  }
}

}  // namespace mlspec
