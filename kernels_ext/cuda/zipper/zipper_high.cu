// How does a GPU add the sparse high part of a weight to the sums of its low part? Its cells of 32 outputs and 64 inputs are spread out
// in shared memory, one a warp, and multiplied by tensor cores: the words of a cell are read once for up to 64 tokens.
//
// A block takes 32 outputs, its warps their cells in turn; sums of the warps are added in order. A token's sums are made in this order
// however many others there are.
#include "../mma.cuh"
#include "../rows/row_launch.cuh"
#include "zipper_high.h"

namespace mlspec {
namespace {

constexpr int kOutputs = 32, kInputs = 64, kWarps = 16, kThreads = kWarps * kWarp;
constexpr int kTileTokens = 8, kSteps = kInputs / 16, kHalves = kOutputs / 16;
constexpr int kRowBytes = kInputs * 2 + 16;  // of a spread cell: eight rows are in different banks
constexpr int kCellBytes = kOutputs * kRowBytes;
constexpr int kSumBytes = kWarps * kOutputs * kTileTokens * 4;
constexpr int kWords = 2;  // of a lane that are loaded while the cell before is multiplied

// Where a place (hf_mlspec/formats/zipper/sparse.py) lies in a spread cell.
__device__ __forceinline__ uint32_t offset_of(uint32_t place) { return place * 2 + place / kInputs * 16; }

__device__ __forceinline__ void store_half(uint32_t to, uint32_t bits) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(uint16_t(bits)) : "memory");
}

__device__ __forceinline__ uint32_t bfloat16_of(int value) { return __float_as_uint(float(value)) >> 16; }  // exact: 8 bits

// Puts the values of a word into the cell, or zeros where they were.
template <bool kClear>
__device__ __forceinline__ void spread(uint32_t cell, uint32_t word, bool wide) {
  if (wide) {
    store_half(cell + offset_of(word & 0x7FF), kClear ? 0 : bfloat16_of(int(word << 8) >> 24));
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t own = half ? word >> 16 : word & 0xFFFF;
    const int code = int(own >> 11);
    if (code) store_half(cell + offset_of(own & 0x7FF), kClear ? 0 : bfloat16_of(code > 16 ? code - 32 : code));
  }
}

// A warp's own part of the words of one cell.
struct Words {
  const uint32_t* from;
  int begin, end;
  uint32_t first[kWords];
  __device__ __forceinline__ void load(const uint32_t* words, int cell_begin, int cell_end, int lane) {
    from = words, begin = cell_begin, end = cell_end;
#pragma unroll
    for (int i = 0; i < kWords; ++i) first[i] = begin + i * kWarp + lane < end ? __ldg(words + begin + i * kWarp + lane) : 0;
  }
  template <bool kClear>
  __device__ __forceinline__ void spread_all(uint32_t cell, bool wide, int lane) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (begin + i * kWarp + lane < end) spread<kClear>(cell, first[i], wide);
    for (int j = begin + kWords * kWarp + lane; j < end; j += kWarp) spread<kClear>(cell, __ldg(from + j), wide);
  }
};

// What lane 4 r + q of a warp multiplies: inputs 16 q to 16 q + 15 of the cell, of row r of the tile.
struct Inputs {
  uint4 words[2];
  __device__ __forceinline__ void load(const mlspec_cuda_zipper_high& p, int64_t token, int64_t cell, int lane) {
    const int64_t column = cell * kInputs + lane % 4 * 16;
    words[0] = words[1] = make_uint4(0, 0, 0, 0);
    if (token + lane / 4 >= p.num_tokens || column >= p.in_features) return;
    const auto* const from =
        reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.x) + (token + lane / 4) * p.in_features + column);
    words[0] = from[0], words[1] = from[1];
  }
  __device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&weights)[4], int step) const {
    const uint4 both = words[step / 2];
    if (step % 2) mma(sums, weights, both.z, both.w);
    else mma(sums, weights, both.x, both.y);
  }
};

__device__ __forceinline__ void store_sum(const mlspec_cuda_zipper_high& p, int64_t token, int64_t output, float sum, float step) {
  const int64_t place = token * p.out_features + output;
  float value = __fmaf_rn(step, sum, p.low[place]);
  if (p.bias)
    value = __fadd_rn(value, p.bias_is_float32 ? static_cast<const float*>(p.bias)[output]
                                               : __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[output]));
  if (p.y_is_float32) static_cast<float*>(p.y)[place] = value;
  else static_cast<__nv_bfloat16*>(p.y)[place] = __float2bfloat16_rn(value);
}

// Blocks along x: slices of 32 outputs, weight after weight; along y: kTiles * 8 tokens.
template <int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles > 2 ? 1 : 2) high_kernel(const __grid_constant__ mlspec_cuda_zipper_high p) {
  extern __shared__ __align__(16) uint8_t shared[];
  launch_dependents();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t slice = blockIdx.x;
  int segment = 0;
  while (slice >= (p.segments[segment].outputs + kOutputs - 1) / kOutputs)
    slice -= (p.segments[segment++].outputs + kOutputs - 1) / kOutputs;
  const mlspec_cuda_zipper_cells& own = p.segments[segment];
  const bool wide = *own.wide != 0;
  const int across = int((p.in_features + kInputs - 1) / kInputs);
  const int32_t* const starts = own.starts + slice * across;
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(own.words);
  const uint32_t cell_at = shared_address(shared) + warp * kCellBytes;
  for (int i = lane * 16; i < kCellBytes; i += kWarp * 16) store_zeros(cell_at + i);
  const uint32_t from = cell_at + (lane % 16) * kRowBytes + lane / 16 * 16;  // ldmatrix: rows, then the second eight columns
  float sums[kHalves][kTiles][4] = {};
  const int64_t first = int64_t(blockIdx.y) * kTiles * kTileTokens;
  Words next;
  if (warp < across) next.load(words, starts[warp], starts[warp + 1], lane);
  wait_for_previous_kernel();
  __syncwarp();
  for (int cell = warp; cell < across; cell += kWarps) {
    const Words now = next;
    if (cell + kWarps < across) next.load(words, starts[cell + kWarps], starts[cell + kWarps + 1], lane);
    if (now.begin == now.end) continue;
    Inputs x[kTiles > 2 ? 1 : kTiles];
    if constexpr (kTiles <= 2) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) x[t].load(p, first + t * kTileTokens, cell, lane);
    }
    now.spread_all<false>(cell_at, wide, lane);
    __syncwarp();
    uint32_t weights[kTiles > 2 ? kSteps : 1][kHalves][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t (&at)[kHalves][4] = weights[kTiles > 2 ? step : 0];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) load_matrices(at[half], from + half * 16 * kRowBytes + step * 32);
      if constexpr (kTiles <= 2) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int half = 0; half < kHalves; ++half) x[t].multiply(sums[half][t], at[half], step);
      }
    }
    if constexpr (kTiles > 2) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        x[0].load(p, first + t * kTileTokens, cell, lane);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
          for (int half = 0; half < kHalves; ++half) x[0].multiply(sums[half][t], weights[step][half], step);
      }
    }
    __syncwarp();
    now.spread_all<true>(cell_at, wide, lane);
    __syncwarp();
  }
  float* const parts = reinterpret_cast<float*>(shared);  // [warps][8 tokens][32 outputs]
  const int64_t local = slice * kOutputs + threadIdx.x % kOutputs, output = own.first_output + local;
  const int own_token = threadIdx.x / kOutputs;
  const float step = local < own.outputs ? own.step[local] : 0.f;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    __syncthreads();
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = lane % 4 * 2 + i % 2, row = half * 16 + i / 2 * 8 + lane / 4;
        parts[(warp * kTileTokens + token) * kOutputs + row] = sums[half][t][i];
      }
    __syncthreads();
    const int64_t token = first + t * kTileTokens + own_token;
    if (own_token < kTileTokens && token < p.num_tokens && local < own.outputs) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum = __fadd_rn(sum, parts[(w * kTileTokens + own_token) * kOutputs + threadIdx.x % kOutputs]);
      store_sum(p, token, output, sum, step);
    }
  }
}

template <int kTiles>
const char* launch_tiles(const mlspec_cuda_zipper_high& p, const mlspec_cuda_row_launch& how) {
  int64_t slices = 0;
  for (int i = 0; i < p.num_segments; ++i) slices += (p.segments[i].outputs + kOutputs - 1) / kOutputs;
  const unsigned pieces = blocks_for(p.num_tokens, kTiles * kTileTokens);
  if (pieces > 65535) return "too many tokens for one launch: call it for fewer tokens";
  constexpr unsigned bytes = kWarps * kCellBytes > kSumBytes ? kWarps * kCellBytes : kSumBytes;
  return launch_rows(how, RowGrid{dim3(unsigned(slices), pieces), kThreads, bytes}, high_kernel<kTiles>, p);
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_zipper_high_linear(const mlspec_cuda_zipper_high* high, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  if (high->num_tokens < 1 || high->out_features < 1 || high->in_features < 32 || high->in_features % 32)
    return "the sparse high part takes 1 token or more, 1 output or more and inputs in multiples of 32";
  if (high->num_segments < 1 || high->num_segments > MLSPEC_CUDA_ZIPPER_SEGMENTS) return "the high part is of 1 to 3 weights";
  if (high->num_tokens <= 8) return launch_tiles<1>(*high, *how);
  if (high->num_tokens <= 16) return launch_tiles<2>(*high, *how);
  if (high->num_tokens <= 32) return launch_tiles<4>(*high, *how);
  return launch_tiles<8>(*high, *how);
}
