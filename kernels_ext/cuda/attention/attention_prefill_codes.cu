// How do keys and values that are codes get wide, and what belongs to their slots aside, for the kernel for prompts? It reads them by
// the copy engine.
#include <type_traits>

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
template <int kBits>
__global__ void __launch_bounds__(kWidenThreads) widen_kernel(const WidenArgs a) {
  launch_dependents();
  wait_for_previous_kernel();
  const int row = blockIdx.z, head = blockIdx.y / 2, first = blockIdx.x * kChunk, dim = int(a.codes.dim), fours = dim / 4, steps = dim / 16;
  const bool values = blockIdx.y % 2;
  const int64_t start = a.tokens.starts[row];
  if (start < 0) return;
  const int64_t end = min(start + min(int64_t(a.tokens.counts[row]), a.tokens.width), a.codes.slots);
  const int count = int(min(end - first, int64_t(kChunk))), pitch = pitch_of<kBits>(dim);
  if (count <= 0) return;
  const char* const from = static_cast<const char*>(values ? a.codes.values : a.codes.keys) + int64_t(first) * pitch +
                           (values ? row * a.codes.value_batch_stride + head * a.codes.value_head_stride
                                   : row * a.codes.key_batch_stride + head * a.codes.key_head_stride);
  __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(values ? a.wide.values : a.wide.keys) + int64_t(first) * dim +
                            (values ? row * a.wide.value_batch_stride + head * a.wide.value_head_stride
                                    : row * a.wide.key_batch_stride + head * a.wide.key_head_stride);
  using Codes = std::conditional_t<kBits == 8, uint32_t, uint16_t>;  // four of them
#pragma unroll 4
  for (int i = threadIdx.x; i < count * fours; i += kWidenThreads) {
    const int slot = i / fours, at = i % fours, four = values ? at : at % 4 * steps + at / 4;
    const uint2 pairs = widened_four<kBits>(*reinterpret_cast<const Codes*>(from + slot * pitch + four * sizeof(Codes)));
    if (values) {
      *reinterpret_cast<uint2*>(to + slot * dim + four * 4) = ordered_four(pairs);  // its own inverse
    } else {
      *reinterpret_cast<uint32_t*>(to + slot * dim + place_of(four, steps)) = pairs.x;
      *reinterpret_cast<uint32_t*>(to + slot * dim + place_of(four, steps) + 8) = pairs.y;
    }
  }
  const int64_t slots = (a.codes.slots + kChunk - 1) / kChunk * kChunk, at = (row * a.codes.kv_heads + head) * slots + first;
  for (int slot = threadIdx.x; slot < count; slot += kWidenThreads) {
    const SlotScale scale = scale_of<kBits>(*reinterpret_cast<const uint32_t*>(from + slot * pitch + pitch - kTailBytes));
    (values ? a.scales.values : a.scales.keys)[at + slot] = scale.step;
    if constexpr (kBits == 4) (values ? a.scales.value_zeros : a.scales.key_zeros)[at + slot] = scale.zero;
  }
}

}  // namespace
}  // namespace mlspec

using namespace mlspec;

const char* mlspec_cuda_widen_cache(const mlspec_cuda_tokens* tokens, const mlspec_cuda_cache* cache, const mlspec_cuda_cache* wide,
                                    const mlspec_cuda_scales* scales, const mlspec_cuda_row_launch* how) {
  if (cache->batch > 65535 || cache->kv_heads > 65535 / 2) return "a call takes up to 65535 rows and 32767 key heads";
  if (cache->slots > INT32_MAX - kChunk) return "a row has too many slots for 32-bit numbers";
  const RowGrid grid{dim3(blocks_for(cache->slots, kChunk), unsigned(2 * cache->kv_heads), unsigned(cache->batch)), kWidenThreads};
  const WidenArgs args{*tokens, *cache, *wide, *scales};
  return cache->code_bits == 4 ? launch_rows(*how, grid, widen_kernel<4>, args) : launch_rows(*how, grid, widen_kernel<8>, args);
}
