// How do GPUs that share a model add up what each computed, with the same bits on all? Every one writes its part into the boxes of the
// others and adds all parts in the order of the ranks.
//
// A line of 16 bytes is 8 of data and, behind each 4, the number of the call: eight bytes arrive together, so that a line whose two
// numbers are right is whole, and nobody needs a fence or a flag. A box is used again after two calls: a rank that writes call n + 2
// has read what all others wrote in call n + 1, which they did behind all of call n.
#include <cuda_bf16.h>

#include "../rows/row_launch.cuh"
#include "ranks.h"

namespace mlspec {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kMostBlocks = 264;                  // two a multiprocessor of Hopper: all are there at once
constexpr uint64_t kPatience = 25ull * 1000 * 1000 * 1000;  // nanoseconds

struct Boxes {
  uint4* of[kMostRanks];
  uint32_t* state;  // the number of the last call, and how many blocks of this one have ended
  int count, index;
};

// Where `sender` writes in a box.
__device__ __forceinline__ int64_t place(const Boxes& boxes, uint32_t call, int sender) {
  return (int64_t(call & 1) * boxes.count + sender) * kExchangeLines;
}

__device__ __forceinline__ void send(uint4* to, uint2 data, uint32_t call) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(data.x), "r"(call), "r"(data.y), "r"(call) : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ uint2 receive(const uint4* from, uint32_t call) {
  uint4 line;
  uint64_t begin = 0;
  for (uint32_t tries = 1;; ++tries) {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w) : "l"(from) : "memory");
    if (line.y == call && line.w == call) return {line.x, line.z};
    if (tries % 65536) continue;
    const uint64_t now = nanoseconds();
    if (!begin) begin = now;
    if (now - begin > kPatience) __trap();
  }
}

__device__ __forceinline__ void add(float (&sum)[kLineElements], uint2 part) {
  const float2 a = widened(part.x), b = widened(part.y);
  sum[0] += a.x, sum[1] += a.y, sum[2] += b.x, sum[3] += b.y;
}

// Lines of x to all others, then y: their sum, or (width > 0) all of them side by side in rows of count * width lines.
__global__ void __launch_bounds__(kThreads) exchange(Boxes boxes, const uint2* x, int64_t lines, int64_t width, uint2* y) {
  wait_for_previous_kernel();
  const uint32_t call = *static_cast<volatile uint32_t*>(boxes.state) + 1;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, step = int64_t(gridDim.x) * kThreads;
  const int64_t own = place(boxes, call, boxes.index);
  for (int64_t line = first; line < lines; line += step) {
    const uint2 data = x[line];
#pragma unroll
    for (int rank = 0; rank < kMostRanks; ++rank)
      if (rank < boxes.count && rank != boxes.index) send(boxes.of[rank] + own + line, data, call);
  }
  const uint4* const box = boxes.of[boxes.index];
  for (int64_t line = first; line < lines; line += step) {
    if (width > 0) {
      uint2* const row = y + line / width * width * boxes.count + line % width;
      for (int rank = 0; rank < boxes.count; ++rank)
        row[rank * width] = rank == boxes.index ? x[line] : receive(box + place(boxes, call, rank) + line, call);
      continue;
    }
    float sum[kLineElements];
    for (int rank = 0; rank < boxes.count; ++rank) {
      const uint2 part = rank == boxes.index ? x[line] : receive(box + place(boxes, call, rank) + line, call);
      if (rank == 0) {
        const float2 a = widened(part.x), b = widened(part.y);
        sum[0] = a.x, sum[1] = a.y, sum[2] = b.x, sum[3] = b.y;
      } else {
        add(sum, part);
      }
    }
    y[line] = {narrowed(sum[0], sum[1]), narrowed(sum[2], sum[3])};
  }
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(boxes.state + 1, 1u) == gridDim.x - 1) boxes.state[1] = 0, boxes.state[0] = call;
}

const char* exchanged(const mlspec_cuda_ranks* ranks, const void* x, int64_t lines, int64_t width, void* y, void* stream, int32_t overlap) {
  Boxes boxes{};
  for (int rank = 0; rank < ranks->count; ++rank) boxes.of[rank] = static_cast<uint4*>(ranks->boxes[rank]);
  boxes.state = reinterpret_cast<uint32_t*>(ranks->state), boxes.count = ranks->count, boxes.index = ranks->index;
  const mlspec_cuda_row_launch how{stream, overlap, 0};
  const unsigned blocks = blocks_for(lines, kThreads);
  return launch_rows(how, {dim3(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads}, exchange, boxes, static_cast<const uint2*>(x), lines,
                     width, static_cast<uint2*>(y));
}

}  // namespace
}  // namespace mlspec

extern "C" {

int64_t mlspec_cuda_box_bytes(int32_t count) { return int64_t(2) * count * kExchangeLines * kLineBytes; }

const char* mlspec_cuda_sum_ranks(const mlspec_cuda_ranks* ranks, const void* x, int64_t elements, void* y, void* stream, int32_t overlap) {
  const int64_t lines = elements / kLineElements;
  for (int64_t first = 0; first < lines; first += kExchangeLines) {
    const int64_t left = lines - first, own = left < kExchangeLines ? left : kExchangeLines;
    const char* problem = mlspec::exchanged(ranks, static_cast<const uint2*>(x) + first, own, 0, static_cast<uint2*>(y) + first, stream, overlap);
    if (problem) return problem;
  }
  return nullptr;
}

const char* mlspec_cuda_gather_ranks(const mlspec_cuda_ranks* ranks, const void* x, int64_t rows, int64_t width, void* y, void* stream,
                                     int32_t overlap) {
  const int64_t across = width / kLineElements, most = kExchangeLines / across;
  if (most < 1) return "a row is longer than a box";
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t own = rows - first < most ? rows - first : most;
    const char* problem = mlspec::exchanged(ranks, static_cast<const uint2*>(x) + first * across, own * across, across,
                                            static_cast<uint2*>(y) + first * across * ranks->count, stream, overlap);
    if (problem) return problem;
  }
  return nullptr;
}
}
