// How do int8 keys and values get wide, and their scales aside, for the kernel for prompts? It reads them by the copy engine.
#include "attention_codes.cuh"

namespace mlspec {
namespace {

constexpr int kWidenThreads = 256;

struct WidenArgs {
  mlspec_cuda_tokens tokens;
  mlspec_cuda_cache codes, wide;
  mlspec_cuda_scales scales;
};

// A block: a chunk of 64 slots, keys or values, of one key head of one row of the batch. Slots that no token sees stay as they are.
__global__ void __launch_bounds__(kWidenThreads) widen_kernel(const WidenArgs a) {
  launch_dependents();
  wait_for_previous_kernel();
  const int row = blockIdx.z, head = blockIdx.y / 2, first = blockIdx.x * kChunk, dim = int(a.codes.dim), words = dim / 4;
  const bool values = blockIdx.y % 2;
  const int64_t start = a.tokens.starts[row];
  if (start < 0) return;
  const int64_t end = min(start + min(int64_t(a.tokens.counts[row]), a.tokens.width), a.codes.slots);
  const int count = int(min(end - first, int64_t(kChunk))), pitch = dim + kScaleBytes;
  if (count <= 0) return;
  const char* const from = static_cast<const char*>(values ? a.codes.values : a.codes.keys) + int64_t(first) * pitch +
                           (values ? row * a.codes.value_batch_stride + head * a.codes.value_head_stride
                                   : row * a.codes.key_batch_stride + head * a.codes.key_head_stride);
  __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(values ? a.wide.values : a.wide.keys) + int64_t(first) * dim +
                            (values ? row * a.wide.value_batch_stride + head * a.wide.value_head_stride
                                    : row * a.wide.key_batch_stride + head * a.wide.key_head_stride);
#pragma unroll 4
  for (int i = threadIdx.x; i < count * words; i += kWidenThreads) {
    const int slot = i / words, word = i % words;
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(from + slot * pitch + word * 4);
    *reinterpret_cast<uint2*>(to + slot * dim + word * 4) = widened_codes(codes);
  }
  const int64_t slots = (a.codes.slots + kChunk - 1) / kChunk * kChunk;
  float* const scales = (values ? a.scales.values : a.scales.keys) + (row * a.codes.kv_heads + head) * slots + first;
  for (int slot = threadIdx.x; slot < count; slot += kWidenThreads)
    scales[slot] = *reinterpret_cast<const float*>(from + slot * pitch + dim);
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_widen_cache(const mlspec_cuda_tokens* tokens, const mlspec_cuda_cache* cache, const mlspec_cuda_cache* wide,
                                    const mlspec_cuda_scales* scales, const mlspec_cuda_row_launch* how) {
  if (cache->batch > 65535 || cache->kv_heads > 65535 / 2) return "a call takes up to 65535 rows and 32767 key heads";
  if (cache->slots > INT32_MAX - kChunk) return "a row has too many slots for 32-bit numbers";
  const RowGrid grid{dim3(blocks_for(cache->slots, kChunk), unsigned(2 * cache->kv_heads), unsigned(cache->batch)), kWidenThreads};
  return launch_rows(*how, grid, widen_kernel, WidenArgs{*tokens, *cache, *wide, *scales});
}
