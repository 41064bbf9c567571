// x [tokens, in] times a nested BF16 weight [out, in] on any GPU since sm_80: the bits of portable_bf16 on the weight it was split
// from.
#include "portable_linear.cuh"
#include "portable_nested.cuh"
#include "portable_nested_halves.cuh"

namespace mlspec::portable {

const char* launch_nested_exact(const mlspec_cuda_linear& a) {
  if (!is_aligned(a.more)) return "the tiles of low bits must start at a multiple of 16 bytes";
  return launch_tokens<NestedHalfTiles>(a);
}

}  // namespace mlspec::portable
