// How do keys and values that are kept as int8 codes reach the tensor cores?
//
// A row is its head's codes and the float32 scale behind them (hf_mlspec/formats/cache/int8.py). 64 rows are a multiple of 16 bytes,
// whatever their width, so a chunk is copied as it lies. Each warp then widens 16 slots of it to bfloat16, which holds every code.
// The scale of a key multiplies, in float32, the products of its slot; that of a value the weights of its slot, before they are
// rounded to bfloat16. The sum of weights is that of the weights as they are.
#pragma once

#include "attention_tile.cuh"

namespace mlspec {

// 64 rows of `pitch` bytes from `first_slot` on. Zeros behind the row `end`, so that there a scale is 0; its first codes may be
// anything.
__device__ __forceinline__ void load_codes(uint32_t to, const char* from, int first_slot, int pitch, int end) {
  const char* const rows = from + int64_t(first_slot) * pitch;
  const int wanted = min(kChunk, end - first_slot) * pitch;
#pragma unroll 5
  for (int at = threadIdx.x % kAttendThreads * 16; at < kChunk * pitch; at += kAttendThreads * 16)
    copy_async(to + at, at < wanted ? rows + at : from, at < wanted);
}

// Two codes, each the low byte of a half, below 0x43: 128 + its low seven bits, less 128, or 256 of a negative code. All exact.
__device__ __forceinline__ uint32_t widened_pair(uint32_t pair) {
  constexpr uint32_t kMinusOne = 0xBF80BF80;
  uint32_t wide;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(wide) : "r"(pair & 0xFF80FF80), "r"(kMinusOne), "r"(pair & 0xFF7FFF7F));
  return wide;
}

// Four codes -> bfloat16, two in a word.
__device__ __forceinline__ uint2 widened_codes(uint32_t codes) {
  return {widened_pair(__byte_perm(codes, 0x43, 0x4140)), widened_pair(__byte_perm(codes, 0x43, 0x4342))};
}

// The codes of the warp's own 16 slots, as bfloat16: rows of kStride elements, zeros behind the head's. rows, wide: addresses of
// whole chunks in shared memory.
template <class Shape>
__device__ __forceinline__ void widen_slots(uint32_t rows, uint32_t wide, int dim) {
  constexpr int kWords = Shape::kDim / 4, kEach = 16 * kWords / kWarp, kAtOnce = 8;  // of a row; of a lane
  static_assert(kEach % kAtOnce == 0, "16 slots are whole batches of words");
  const int first = threadIdx.x / kWarp % kAttendWarps * 16, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int batch = 0; batch < kEach; batch += kAtOnce) {
    uint32_t codes[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = (batch + i) * kWarp + lane, slot = first + place / kWords, word = place % kWords;
      codes[i] = word * 4 < dim ? load_shared(rows + uint32_t(slot * (dim + kScaleBytes) + word * 4)) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = (batch + i) * kWarp + lane, slot = first + place / kWords, word = place % kWords;
      const uint2 elements = widened_codes(codes[i]);
      store_shared(wide + uint32_t(slot * Shape::kStride + word * 4) * 2, elements.x, elements.y);
    }
  }
}

// The scales of the slots whose products and weights this thread has.
struct SlotScales {
  float of[2][2];

  __device__ __forceinline__ SlotScales(uint32_t rows, int dim) {
    const int slot = threadIdx.x / kWarp % kAttendWarps * 16 + threadIdx.x % 4 * 2, pitch = dim + kScaleBytes;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) of[n][e] = __uint_as_float(load_shared(rows + uint32_t((slot + n * 8 + e) * pitch + dim)));
  }
  template <int kTiles>
  __device__ __forceinline__ void multiply(float (&products)[kTiles][2][4]) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) products[i][n][e] = __fmul_rn(products[i][n][e], of[n][e % 2]);
  }
  __device__ __forceinline__ uint32_t operator()(int n, float low, float high) const {
    return narrowed(scaled_weight(low, of[n][0]), scaled_weight(high, of[n][1]));
  }
};

}  // namespace mlspec
