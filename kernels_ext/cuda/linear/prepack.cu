// Which place of the tiles does a saved weight go to, and back? The order is drawn in linear_formats.cuh.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "../../formats.h"
#include "linear.h"

namespace mlspec {
namespace {

using gpu_tiles::kCodeBytes;

constexpr int kOutputs = gpu_tiles::kTileOutputs, kInputs = gpu_tiles::kTileInputs, kThreads = 256;
constexpr int kUnused = 8;       // int4 code beyond the weight's edge: worth 0, its scale is 0 too
constexpr int kBiasOfScale = 126;  // scale byte -> exponent bits of 2^126 * scale
constexpr int kLargestUnshifted = 128;  // the largest scale byte whose biased exponent is that of a number

struct Shape {
  int64_t in, out;
  int group;
  bool zeros, mxfp4;
  __host__ __device__ int64_t chunks() const { return (in + kInputs - 1) / kInputs; }
  __host__ __device__ int64_t tiles() const { return chunks() * ((out + 2 * kOutputs - 1) / (2 * kOutputs)) * 2; }
  __host__ __device__ int groups() const { return kInputs / group; }
  __host__ __device__ int scale_bytes() const { return kOutputs * groups() * (mxfp4 ? 1 : 2); }
  __host__ __device__ int tile_bytes() const {
    return kCodeBytes + scale_bytes() + (zeros ? kOutputs * groups() : 0);
  }
  // Tiles lie [pair of output tiles, chunk, tile of the pair].
  __host__ __device__ int64_t first_output(int64_t tile) const { return tile / 2 / chunks() * 2 * kOutputs + tile % 2 * kOutputs; }
  __host__ __device__ int64_t first_input(int64_t tile) const { return tile / 2 % chunks() * kInputs; }
  __host__ __device__ int64_t tile_of(int64_t output, int64_t input) const {
    return (output / (2 * kOutputs) * chunks() + input / kInputs) * 2 + output / kOutputs % 2;
  }
};

// A pair of neighbouring inputs (even, odd) of one output: register i of operand A of a step of 16 inputs.
struct Place {
  int r, warp, step, lane, i;
  __host__ __device__ static Place of(int row, int input) {  // within the tile, input even
    return {row % 8, row / 16, input / 16, row % 8 * 4 + input % 8 / 2, row % 16 / 8 + input % 16 / 8 * 2};
  }
  __host__ __device__ int word_of_codes() const { return ((warp * 2 + step / 4) * 32 + lane) * 4 + step % 4; }
  // Of the row's scale for a group: [warp][r][group][h]; MXFP4 [warp][r][pair of blocks][h][block of the pair].
  __host__ __device__ int scale(int group, int groups, bool mxfp4) const {
    const int row = (warp * 8 + r) * groups * 2;
    return mxfp4 ? row + group / 2 * 4 + i % 2 * 2 + group % 2 : row + group * 2 + i % 2;
  }
};

__host__ __device__ uint32_t spread_int4(int code, int i) { return uint32_t(code ^ 8) << 4 * i; }

__host__ __device__ int gather_int4(uint32_t half_word, int i) { return int(half_word >> 4 * i & 15) ^ 8; }

// Sign and the three other bits of an MXFP4 code of a[i], in a half word.
__host__ __device__ int sign_bit(int i) { return i == 0 ? 15 : i == 1 ? 12 : i == 2 ? 13 : 14; }
__host__ __device__ int magnitude_bit(int i) { return i == 0 ? 6 : i == 1 ? 3 : i == 2 ? 0 : 9; }

__host__ __device__ uint32_t spread_mxfp4(int code, int i) {
  return uint32_t(code >> 3) << sign_bit(i) | uint32_t(code & 7) << magnitude_bit(i);
}

__host__ __device__ int gather_mxfp4(uint32_t half_word, int i) {
  return int(half_word >> sign_bit(i) & 1) << 3 | int(half_word >> magnitude_bit(i) & 7);
}

__device__ int code_at(const Shape& s, const uint8_t* packed, int64_t row, int64_t input) {
  if (row >= s.out || input >= s.in) return s.mxfp4 || s.zeros ? 0 : kUnused;
  return packed[row * (s.in / 2) + input / 2] >> input % 2 * 4 & 15;
}

// One thread, one word of codes (its registers 0..3, even and odd input).
__global__ void pack_codes(Shape s, const uint8_t* packed, uint8_t* tiles, int64_t words) {
  const int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (index >= words) return;
  const int64_t tile = index / (kCodeBytes / 4);
  const int word = int(index % (kCodeBytes / 4)), lane = word / 4 % 32, step = word / 128 % 2 * 4 + word % 4;
  const int64_t row0 = s.first_output(tile) + word / 256 * 16 + lane / 4;
  const int64_t input0 = s.first_input(tile) + step * 16 + lane % 4 * 2;
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    for (int odd = 0; odd < 2; ++odd) {
      const int code = code_at(s, packed, row0 + i % 2 * 8, input0 + i / 2 * 8 + odd);
      bits |= (s.mxfp4 ? spread_mxfp4(code, i) : spread_int4(code, i)) << 16 * odd;
    }
  }
  reinterpret_cast<uint32_t*>(tiles + tile * s.tile_bytes())[word] = bits;
}

// The result is 2^shift times what the tiles hold, so that the largest scale's exponent fits. `shift` is 0 before.
__global__ void find_shift(const uint8_t* scales, int64_t count, int32_t* shift) {
  int largest = 0;
  for (int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x; i < count; i += int64_t(gridDim.x) * kThreads)
    largest = max(largest, int(scales[i]));
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0 && largest > kLargestUnshifted) atomicMax(shift, largest - kLargestUnshifted);
}

// One thread, one scale (and zero point) of the tiles.
__global__ void pack_scales(Shape s, const void* scales, const uint8_t* zeros, uint8_t* tiles, int64_t count, bool pack,
                            void* scales_back, uint8_t* zeros_back, const int32_t* exponent_shift) {
  const int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (index >= count) return;
  const int groups = s.groups(), bias = s.mxfp4 ? kBiasOfScale - *exponent_shift : 0;
  const int64_t tile = index / (kOutputs * groups);
  const int row = int(index / groups % kOutputs), group = int(index % groups);
  const int place = Place::of(row, 0).scale(group, groups, s.mxfp4);
  const int64_t output = s.first_output(tile) + row, column = s.first_input(tile) / s.group + group;
  const bool inside = output < s.out && column < s.in / s.group;
  const int64_t source = output * (s.in / s.group) + column;
  uint8_t* packed_scales = tiles + tile * s.tile_bytes() + kCodeBytes;
  uint8_t* packed_zero = packed_scales + s.scale_bytes() + place;
  if (pack) {
    if (s.mxfp4) packed_scales[place] = inside ? static_cast<const uint8_t*>(scales)[source] + bias : 1;
    else reinterpret_cast<half*>(packed_scales)[place] = inside ? static_cast<const half*>(scales)[source] : __float2half(0.0f);
    if (s.zeros) *packed_zero = inside ? zeros[source] : 0;
  } else if (inside) {
    if (s.mxfp4) static_cast<uint8_t*>(scales_back)[source] = packed_scales[place] - bias;
    else static_cast<half*>(scales_back)[source] = reinterpret_cast<const half*>(packed_scales)[place];
    if (s.zeros) zeros_back[source] = *packed_zero;
  }
}

// One thread, one byte of the saved weight.
__global__ void unpack_codes(Shape s, const uint8_t* tiles, uint8_t* packed, int64_t bytes) {
  const int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (index >= bytes) return;
  const int64_t row = index / (s.in / 2), input = index % (s.in / 2) * 2;
  const Place place = Place::of(int(row % kOutputs), int(input % kInputs));
  const uint8_t* tile = tiles + s.tile_of(row, input) * s.tile_bytes();
  const uint32_t word = reinterpret_cast<const uint32_t*>(tile)[place.word_of_codes()];
  const uint32_t even = word & 0xFFFF, odd = word >> 16;
  packed[index] = s.mxfp4 ? gather_mxfp4(even, place.i) | gather_mxfp4(odd, place.i) << 4
                          : gather_int4(even, place.i) | gather_int4(odd, place.i) << 4;
}

Shape shape_of(const mlspec_cuda_prepack& a) {
  return {a.in_features, a.out_features, a.group_size, a.zero != nullptr, a.mxfp4 != 0};
}

unsigned blocks(int64_t threads) { return unsigned((threads + kThreads - 1) / kThreads); }

const char* problem_of(const mlspec_cuda_prepack& a) {
  if (!is_group_size(a.group_size)) return "groups hold 32, 64 or 128 inputs";
  if (a.in_features < 1 || a.out_features < 1 || a.in_features % a.group_size) return "in_features must be whole groups";
  if (!a.mxfp4) return nullptr;
  if (a.group_size != kBlock || a.zero) return "MXFP4 has blocks of 32 and no zero points";
  return a.exponent_shift ? nullptr : "MXFP4 needs a place for the exponent shift";
}

const char* move(const mlspec_cuda_prepack& a, bool pack) {
  if (const char* problem = problem_of(a)) return problem;
  const Shape s = shape_of(a);
  const auto stream = static_cast<cudaStream_t>(a.stream);
  uint8_t* tiles = static_cast<uint8_t*>(a.tiles);
  uint8_t* packed = static_cast<uint8_t*>(a.weight);
  if (s.mxfp4 && pack) {
    cudaMemsetAsync(a.exponent_shift, 0, sizeof(int32_t), stream);
    const int64_t count = s.out * (s.in / s.group);
    find_shift<<<blocks(count) < 1024 ? blocks(count) : 1024, kThreads, 0, stream>>>(static_cast<const uint8_t*>(a.scale), count,
                                                                                    a.exponent_shift);
  }
  const int64_t words = s.tiles() * kCodeBytes / 4, scales = s.tiles() * kOutputs * s.groups(), bytes = s.out * s.in / 2;
  if (pack) pack_codes<<<blocks(words), kThreads, 0, stream>>>(s, packed, tiles, words);
  else unpack_codes<<<blocks(bytes), kThreads, 0, stream>>>(s, tiles, packed, bytes);
  pack_scales<<<blocks(scales), kThreads, 0, stream>>>(s, a.scale, static_cast<const uint8_t*>(a.zero), tiles, scales, pack,
                                                       a.scale, static_cast<uint8_t*>(a.zero), a.exponent_shift);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace
}  // namespace mlspec

extern "C" int64_t mlspec_cuda_tile_bytes(const mlspec_cuda_prepack* args) {
  const mlspec::Shape shape = mlspec::shape_of(*args);
  return shape.tiles() * shape.tile_bytes();
}

extern "C" const char* mlspec_cuda_prepack_tiles(const mlspec_cuda_prepack* args) { return mlspec::move(*args, true); }

extern "C" const char* mlspec_cuda_unprepack_tiles(const mlspec_cuda_prepack* args) { return mlspec::move(*args, false); }
