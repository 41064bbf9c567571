// x [tokens, in] times a nested BF16 weight [out, in], the bits of bf16_linear on the weight it was split from: the same blocks
// share a tile's inputs at the same places, and one group of warps adds up its chunks, 16 inputs at a time.
#include "nested_linear.cuh"

namespace mlspec {
namespace {

// The fastest measured on an H200, 8192 x 8192: 31.7 us up to 16 tokens, 69 us at 288 (bf16_linear 33 and 65); wgmma is as fast
// as mma for few.
int variant_of(int64_t tokens) {
  if (tokens <= 8) return 111;
  if (tokens <= 16) return 211;
  if (tokens <= 32) return 412;
  if (tokens <= 64) return 822;
  if (tokens <= 128) return 1622;
  return (tokens + 287) / 288 < (tokens + 255) / 256 ? 3622 : 3222;
}

template <int kTokenTiles, int kTiles, bool kWgmma = true>
const char* launch_exact(const mlspec_cuda_linear& a) {
  return launch<Variant<NestedExactWeights, kTokenTiles, kTiles, kWgmma>>(a);
}

}  // namespace

const char* launch_nested_exact(const mlspec_cuda_linear& a) {
  switch (a.variant ? a.variant : variant_of(a.num_tokens)) {
    case 111: return launch_exact<1, 1, false>(a);
    case 211: return launch_exact<2, 1, false>(a);
    case 412: return launch_exact<4, 1>(a);
    case 822: return launch_exact<8, 2>(a);
    case 1622: return launch_exact<16, 2>(a);
    case 3222: return launch_exact<32, 2>(a);
    case 3622: return launch_exact<36, 2>(a);
    default: return "no such variant of the kernel";
  }
}

}  // namespace mlspec
