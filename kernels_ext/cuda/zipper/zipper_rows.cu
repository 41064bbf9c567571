// Rows of an embedding in two parts, out of planes of bits and the places of the inputs whose second bit is not the sign's.
#include <cuda_fp16.h>

#include "zipper_rows.h"
#include "../rows/row_launch.cuh"

namespace mlspec {
namespace {

constexpr int kTableThreads = 128, kTablePiece = 8192;  // columns of a row that a block writes
constexpr int kPlacesTogether = 128;                    // columns whose places are counted by one byte

// Bit i of word w: whether column 32 w + i of the piece has a second bit that is not its sign's.
__device__ __forceinline__ void mark_places(const mlspec_cuda_zipper_table& table, int64_t id, int64_t first, uint32_t* marked) {
  const int64_t groups = (table.width + kPlacesTogether - 1) / kPlacesTogether, first_group = first / kPlacesTogether;
  const uint8_t* const counts = table.places + table.begins[id];
  const int64_t g = first_group + threadIdx.x;
  if (threadIdx.x >= kTablePiece / kPlacesTogether || g >= groups) return;
  const uint8_t* place = counts + groups;
  for (int64_t i = 0; i < g; ++i) place += counts[i];
  uint32_t* const own = marked + threadIdx.x * (kPlacesTogether / 32);
  for (int i = 0; i < kPlacesTogether / 32; ++i) own[i] = 0;
  for (int n = 0; n < counts[g]; ++n) own[place[n] / 32 % (kPlacesTogether / 32)] |= 1u << place[n] % 32;
}

__global__ void __launch_bounds__(kTableThreads) zipper_rows_kernel(const mlspec_cuda_zipper_table table, const int32_t* ids,
                                                                   float scale, __nv_bfloat16* out) {
  __shared__ uint32_t marked[kTablePiece / 32];
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t given = ids[blockIdx.x], id = given < 0 ? 0 : given < table.rows ? given : table.rows - 1;
  const int64_t first = int64_t(blockIdx.y) * kTablePiece, bytes = table.width / 8;
  const bool sparse = table.begins != nullptr;
  if (sparse) {
    mark_places(table, id, first, marked);
    __syncthreads();
  }
  const float step = __half2float(static_cast<const __half*>(table.step)[id]);
  const int top = table.count + table.lowest + int(sparse) - 1;
  const uint8_t* const planes = table.planes + id * table.count * bytes;
  const int64_t end = bytes < (first + kTablePiece) / 8 ? bytes : (first + kTablePiece) / 8;
  for (int64_t j = first / 8 + threadIdx.x; j < end; j += kTableThreads) {
    const uint32_t positive = planes[j];
    const uint32_t other = sparse ? reinterpret_cast<const uint8_t*>(marked)[j - first / 8] : 0;
    int codes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int sign = int(~positive >> i & 1);
      codes[i] = -(sign << top) + (sparse ? (sign ^ int(other >> i & 1)) << (top - 1) : 0);
    }
    for (int p = 1; p < table.count; ++p) {
      const uint32_t plane = planes[p * bytes + j];
      const int shift = table.count - 1 - p + table.lowest;
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] += int(plane >> i & 1) << shift;
    }
    alignas(16) __nv_bfloat16 values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = __float2bfloat16_rn(float(codes[i]) * step);
      if (scale != 1.0f) values[i] = __float2bfloat16_rn(__bfloat162float(values[i]) * scale);
    }
    *reinterpret_cast<uint4*>(out + int64_t(blockIdx.x) * table.width + 8 * j) = *reinterpret_cast<const uint4*>(values);
  }
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_zipper_rows(const mlspec_cuda_zipper_table* table, const int32_t* ids, int64_t n, float scale,
                                               void* out, const mlspec_cuda_row_launch* how) {
  using namespace mlspec;
  if (table->rows < 1 || table->width < 32 || table->width % 32 || table->width > (int64_t(1) << 20) || n < 1 || n > INT32_MAX)
    return "zipper_rows takes 1 to 2^31 - 1 ids, a table of 1 row or more and a width that is a multiple of 32, up to 2^20";
  const RowGrid grid{dim3(unsigned(n), unsigned(blocks_for(table->width, kTablePiece))), kTableThreads};
  return launch_rows(*how, grid, zipper_rows_kernel, *table, ids, scale, static_cast<__nv_bfloat16*>(out));
}
