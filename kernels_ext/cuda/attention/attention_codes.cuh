// How do keys and values that are kept as codes reach the tensor cores?
//
// A row is its head's codes and four bytes behind them: int8 and a float32 scale, or two codes a byte and their two ends
// (hf_mlspec/formats/cache/). 64 rows are a multiple of 16 bytes, whatever their width, so a chunk is copied as it lies. From there
// threads read codes straight into operands: widened to bfloat16, which holds every code, in registers.
//
// Of keys a thread has four elements of each step of 16 in the order (0, 2), (1, 3); they are neighbours in a row, so that it reads
// them together. So queries stand in another order, place_of, here and in the kernel for prompts. Of values it has as many
// neighbouring columns as its warp has tiles; for each pairs of slots.
//
// A code is worth step * code + zero (int8: without a zero; int4: of code - 8). What belongs to a slot comes late, in float32:
// scores are step * product + zero * sum of the query; weights are multiplied by the value's step before they are rounded to bfloat16,
// and weight * zero is summed beside them. The sum of weights is that of the weights as they are.
#pragma once

#include "attention_walk.cuh"

namespace mlspec {

template <int kBits>
__host__ __device__ __forceinline__ constexpr int pitch_of(int dim) {
  return dim * kBits / 8 + kTailBytes;
}

// 64 rows of `pitch` bytes from `first_slot` on, kMost bytes at most. Zeros behind the row `end`; its first bytes may be anything.
template <int kMost>
__device__ __forceinline__ void load_codes(uint32_t to, const char* from, int first_slot, int pitch, int end) {
  const char* const rows = from + int64_t(first_slot) * pitch;
  const int wanted = min(kChunk, end - first_slot) * pitch, mine = threadIdx.x % kAttendThreads * 16;
#pragma unroll
  for (int at = 0; at < kMost; at += kAttendThreads * 16)
    if (mine + at < kChunk * pitch) copy_async(to + mine + at, rows + mine + at, mine + at < wanted);  // else nothing is read
}

// --- codes -> bfloat16, two in a word, all exact.

__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Two int8 codes, each the low byte of a half, below 0x43: 128 + its low seven bits, less 128, or 256 of a negative code.
__device__ __forceinline__ uint32_t widened_bytes(uint32_t pair) {
  constexpr uint32_t kMinusOne = 0xBF80BF80;
  return fma_pair(pair & 0xFF80FF80, kMinusOne, pair & 0xFF7FFF7F);
}

// Two int4 codes, the low bits of halves: 128 + code, less 136.
__device__ __forceinline__ uint32_t widened_nibbles(uint32_t pair) {
  constexpr uint32_t kOne = 0x3F803F80, kMinus136 = 0xC308C308;
  uint32_t d;
  asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(d) : "r"(pair));  // (a & b) | c, which C++ makes two of
  return fma_pair(d, kOne, kMinus136);
}

// Four codes of a row, its low kBits / 2 bytes -> elements (0, 2), (1, 3).
template <int kBits>
__device__ __forceinline__ uint2 widened_four(uint32_t codes) {
  if constexpr (kBits == 8) return {widened_bytes(__byte_perm(codes, 0x43, 0x4240)), widened_bytes(__byte_perm(codes, 0x43, 0x4341))};
  const uint32_t bytes = __byte_perm(codes, 0, 0x4140);
  return {widened_nibbles(bytes), widened_nibbles(bytes >> 4)};
}

// The same columns of two slots -> (low, high) of each column.
template <int kBits, int kColumns>
__device__ __forceinline__ void widened_columns(uint32_t low, uint32_t high, uint32_t (&pairs)[kColumns]) {
  if constexpr (kBits == 8) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      const uint32_t both = __byte_perm(low, high, c == 0 ? 0x5140 : 0x7362);
      pairs[c] = widened_bytes(__byte_perm(both, 0x43, 0x4140));
      pairs[c + 1] = widened_bytes(__byte_perm(both, 0x43, 0x4342));
    }
  } else {
    const uint32_t both = __byte_perm(low, high, 0x5410);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) pairs[c] = widened_nibbles(both >> 4 * c);
  }
}

// Where elements 4 * four .. stand, of a head of 16 * steps: (0, 2) there, (1, 3) eight places behind.
__device__ __forceinline__ int place_of(int four, int steps) {
  return four < 4 * steps ? four % steps * 16 + four / steps * 2 : four / 4 * 16 + four % 4 * 2;
}

__device__ __forceinline__ uint2 ordered_four(uint2 elements) {
  return {__byte_perm(elements.x, elements.y, 0x5410), __byte_perm(elements.x, elements.y, 0x7632)};
}

// --- what belongs to a slot.

struct SlotScale {
  float step, zero;
};

template <int kBits>
__device__ __forceinline__ SlotScale scale_of(uint32_t tail) {
  if constexpr (kBits == 8) return {__uint_as_float(tail), 0.f};
  const float low = __uint_as_float(tail << 16), high = __uint_as_float(tail & 0xFFFF0000u);
  const float step = __fmul_rn(__fsub_rn(high, low), 1.f / 15.f);
  return {step, fmaf(8.f, step, low)};
}

// query_sum: of the query's elements; of int8 codes not looked at.
template <int kBits>
__device__ __forceinline__ float scaled_product(float product, SlotScale scale, float query_sum) {
  if constexpr (kBits == 8) return __fmul_rn(product, scale.step);
  return fmaf(product, scale.step, __fmul_rn(scale.zero, query_sum));
}

// What two neighbouring slots' zeros add to a row.
__device__ __forceinline__ float shift_of(float low, float high, float low_zero, float high_zero) {
  return __fadd_rn(scaled_weight(low, low_zero), scaled_weight(high, high_zero));
}

// Of keys or values, the slots whose products and weights this thread has. rows: shared memory address of the chunk.
template <class Shape>
struct SlotScales {
  SlotScale of[2][2];

  __device__ __forceinline__ SlotScales(uint32_t rows, int dim) {
    const int slot = threadIdx.x / kWarp % kAttendWarps * 16 + threadIdx.x % 4 * 2, pitch = pitch_of<Shape::kBits>(dim);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        of[n][e] = scale_of<Shape::kBits>(load_shared<4>(rows + uint32_t((slot + n * 8 + e) * pitch + pitch - kTailBytes)));
  }
  __device__ __forceinline__ void multiply(float (&products)[Shape::kTiles][2][4], const float (&sums)[Shape::kTiles][2]) const {
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < Shape::kResults; ++e) products[i][n][e] = scaled_product<Shape::kBits>(products[i][n][e], of[n][e % 2], sums[i][e / 2]);
  }
  __device__ __forceinline__ uint32_t operator()(int n, float low, float high) const {
    return narrowed(scaled_weight(low, of[n][0].step), scaled_weight(high, of[n][1].step));
  }
  __device__ __forceinline__ float shift(int n, float low, float high) const {
    return shift_of(low, high, of[n][0].zero, of[n][1].zero);
  }
};

// --- queries.

// The sums of a tile's queries, to shared memory. Each is taken by one warp: a lane's elements, 32 apart, then lanes.
__device__ __forceinline__ void sum_queries(const AttentionArgs& a, const Tile& tile, int first_row, int rows, int warp, int warps,
                                            float* sums) {
  const int lane = threadIdx.x % kWarp;
  for (int row = first_row + warp; row < first_row + rows; row += warps) {
    const __nv_bfloat16* const query = query_of(a, tile, row);
    float sum = 0.f;
    if (query)
      for (int i = lane; i < a.cache.dim; i += kWarp) sum = __fadd_rn(sum, load_one(query + i));
    sum = warp_sum(sum);
    if (lane == 0) sums[row] = sum;
  }
}

// A block's queries in the order of the codes; behind them the sums of their elements.
template <class Shape>
__device__ __forceinline__ void load_ordered_queries(const AttentionArgs& a, const Tile& tile, char* to) {
  constexpr int kFours = Shape::kDim / 4;
  const int dim = int(a.cache.dim), steps = dim / 16;
  for (int i = threadIdx.x; i < Shape::kRows * kFours; i += blockDim.x) {
    const int row = i / kFours, four = i % kFours, place = place_of(four, steps);
    const __nv_bfloat16* const query = query_of(a, tile, row);
    const bool inside = query && four * 4 < dim;
    const uint2 words = ordered_four(inside ? *reinterpret_cast<const uint2*>(query + four * 4) : uint2{0, 0});
    auto* const at = reinterpret_cast<__nv_bfloat16*>(to) + row * Shape::kStride + place;
    *reinterpret_cast<uint32_t*>(at) = words.x;
    *reinterpret_cast<uint32_t*>(at + 8) = words.y;
  }
  if constexpr (Shape::kBits == 4)
    sum_queries(a, tile, 0, Shape::kRows, threadIdx.x / kWarp, blockDim.x / kWarp,
                reinterpret_cast<float*>(to + Shape::kRows * Shape::kStride * 2));
}

// Where a thread reads its operands, and the sums of its rows' elements.
template <class Shape>
struct OrderedQueries {
  uint32_t base;
  float sums[Shape::kTiles][2];

  __device__ __forceinline__ void load(const char* queries) {
    const int lane = threadIdx.x % kWarp;
    base = row_operands<Shape>(shared_address(queries), Shape::kStride);
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
      for (int r = 0; r < Shape::kHalves; ++r) {
        const auto* const all = reinterpret_cast<const float*>(queries + Shape::kRows * Shape::kStride * 2);
        sums[i][r] = Shape::kBits == 4 ? all[i * 16 + r * 8 + lane / 4] : 0.f;
      }
  }
  __device__ __forceinline__ void operand(int tile, int k, uint32_t (&a)[4]) const {
    load_matrices(a, base + tile * 16 * Shape::kStride * 2 + k * 32);
  }
};

// --- products.

// products[tile][n][.]: rows of the tiles with slots 16 warp + 8 n .. of the chunk.
template <class Shape>
__device__ __forceinline__ void multiply_coded_keys(const OrderedQueries<Shape>& queries, uint32_t keys, int dim,
                                                    float (&products)[Shape::kTiles][2][4]) {
  constexpr int kSteps = Shape::kDim / 16, kAtOnce = kSteps < 8 ? kSteps : 8, kBytes = Shape::kBits / 2;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kAttendWarps, pitch = pitch_of<Shape::kBits>(dim);
  const uint32_t first = keys + uint32_t((warp * 16 + lane / 4) * pitch + lane % 4 * (dim / 16) * kBytes);
#pragma unroll
  for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
    for (int n = 0; n < 2; ++n) products[i][n][0] = products[i][n][1] = products[i][n][2] = products[i][n][3] = 0.f;
#pragma unroll
  for (int batch = 0; batch < kSteps; batch += kAtOnce) {
    uint32_t codes[kAtOnce][2];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
      for (int n = 0; n < 2; ++n) codes[k][n] = load_shared<kBytes>(first + uint32_t(n * 8 * pitch + (batch + k) * kBytes));
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const uint2 low = widened_four<Shape::kBits>(codes[k][0]), high = widened_four<Shape::kBits>(codes[k][1]);
#pragma unroll
      for (int i = 0; i < Shape::kTiles; ++i) {
        uint32_t a[4];
        queries.operand(i, batch + k, a);
        mma(products[i][0], a, low.x, low.y);
        mma(products[i][1], a, high.x, high.y);
      }
    }
  }
}

// The codes of values that a thread multiplies: its columns of 16 of the chunk's slots.
template <class Shape>
struct ValueCodes {
  static constexpr int kColumns = Shape::kOutTiles < 4 ? Shape::kOutTiles : 4, kBytes = kColumns * Shape::kBits / 8;
  static constexpr int kParts = Shape::kOutTiles / kColumns;
  uint32_t codes[kChunk / 16][kParts][4];

  __device__ __forceinline__ void load(uint32_t values, int dim) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kAttendWarps, pitch = pitch_of<Shape::kBits>(dim);
    const int column = (warp * 8 + lane / 4) * Shape::kOutTiles;
    const uint32_t first = values + uint32_t(lane % 4 * 2 * pitch + column * Shape::kBits / 8);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int s = 0; s < 4; ++s)
          codes[k][part][s] = load_shared<kBytes>(first + uint32_t((k * 16 + s / 2 * 8 + s % 2) * pitch + part * kBytes));
  }
  __device__ __forceinline__ void multiply(uint32_t weights, const float (&factor)[Shape::kTiles][2], Attended<Shape>& state) const {
    const uint32_t weight = row_operands<Shape>(weights, Shape::kWeightStride);
    state.rescale(factor);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      uint32_t a[Shape::kTiles][4];
#pragma unroll
      for (int i = 0; i < Shape::kTiles; ++i) load_matrices(a[i], weight + i * 16 * Shape::kWeightStride * 2 + k * 32);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t low[kColumns], high[kColumns];
        widened_columns<Shape::kBits>(codes[k][part][0], codes[k][part][1], low);
        widened_columns<Shape::kBits>(codes[k][part][2], codes[k][part][3], high);
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
#pragma unroll
          for (int i = 0; i < Shape::kTiles; ++i) mma(state.out[i][part * kColumns + c], a[i], low[c], high[c]);
      }
    }
  }
};

}  // namespace mlspec
