// Rows of a nested BF16 weight as an embedding table: exact values, out of its tiles.
#include "nested_linear_format.cuh"
#include "nested_rows.h"
#include "../rows/row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kRowThreads = 64, kLanesOfRow = 8;  // lanes that share 128 inputs of a row: two halves, q 0..3

// In every thread: 16 inputs of a row, 64 f + 16 s + 8 t + 2 q + e of a chunk.
struct RowPlace {
  int64_t tile;
  int code, scale, h;
  __device__ __forceinline__ RowPlace(int64_t row, int64_t chunks, int64_t chunk, int f, int q) {
    const int in_tile = int(row % kTileOutputs), w = in_tile / 16, r = in_tile % 8;
    h = in_tile / 8 % 2;
    tile = (row / (2 * kTileOutputs) * chunks + chunk) * 2 + row / kTileOutputs % 2;
    code = ((w * 2 + f) * 32 + 4 * r + q) * 16;
    scale = (w * 8 + r) * 8 + f * 4 + h * 2;
  }
};

// Two weights, numbers k and k + 2 of the lane's row: even and odd input. base: 2^base is the block's, 7 bits up.
__device__ __forceinline__ float2 joined(uint32_t nibbles, uint32_t low, uint32_t high, uint32_t base, int k, int h) {
  float v[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int byte = (k + 2 * e) * 8;
    const uint32_t field = (low >> byte & 0xFF) | (high >> (byte + 4 * h) & 0xF) << 8;
    const uint32_t sign = nibbles >> (byte + (h ? 3 : 7)) & 1;
    v[e] = __uint_as_float((sign << 15 | (field ? field + base : 0)) << 16);
  }
  return {v[0], v[1]};
}

__global__ void __launch_bounds__(kRowThreads) nested_rows_kernel(const mlspec_cuda_nested_table table, const int32_t* ids,
                                                                 float scale, __nv_bfloat16* out) {
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t id = ids[blockIdx.x], row = id < 0 ? 0 : id < table.rows ? id : table.rows - 1;
  const int64_t chunks = (table.width + kTileInputs - 1) / kTileInputs;
  const int32_t shift = *table.exponent_shift;
  const int lane = threadIdx.x % kLanesOfRow, f = lane / 4, q = lane % 4;
  for (int64_t chunk = (int64_t(blockIdx.y) * kRowThreads + threadIdx.x) / kLanesOfRow; chunk < chunks;
       chunk += int64_t(gridDim.y) * (kRowThreads / kLanesOfRow)) {
    const RowPlace place(row, chunks, chunk, f, q);
    const uint8_t* tile = static_cast<const uint8_t*>(table.tiles) + place.tile * kScaledTileBytes;
    const uint8_t* fields = static_cast<const uint8_t*>(table.low_tiles) + place.tile * kFieldBytes + place.code;
    const uint32_t* nibbles = reinterpret_cast<const uint32_t*>(tile + place.code);
    const uint32_t* high = reinterpret_cast<const uint32_t*>(fields + 2 * kCodeBytes);
    const uint8_t* scales = tile + kCodeBytes + place.scale;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const uint32_t low = reinterpret_cast<const uint32_t*>(fields + s / 2 * kCodeBytes)[s % 2 * 2 + place.h];
      const uint32_t base = uint32_t(scales[s / 2] - 128 + shift - 31) << 7;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int64_t input = chunk * kTileInputs + 64 * f + 16 * s + 8 * t + 2 * q;
        const float2 pair = joined(nibbles[s], low, high[s], base, t, place.h);
        if (input < table.width)
          *reinterpret_cast<uint32_t*>(out + blockIdx.x * table.width + input) = narrowed(pair.x * scale, pair.y * scale);
      }
    }
  }
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_nested_rows(const mlspec_cuda_nested_table* table, const int32_t* ids, int64_t n, float scale,
                                               void* out, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  if (table->rows < 1 || table->width < 32 || table->width % 32 || n < 1 || n > INT32_MAX)
    return "nested_rows takes 1 to 2^31 - 1 ids, a table of 1 row or more and a width that is a multiple of 32";
  const unsigned pieces = blocks_for(blocks_for(table->width, kTileInputs), kRowThreads / kLanesOfRow);
  const RowGrid grid{dim3(unsigned(n), pieces < 65535 ? pieces : 65535), kRowThreads};
  return launch_rows(*how, grid, nested_rows_kernel, *table, ids, scale, static_cast<__nv_bfloat16*>(out));
}
