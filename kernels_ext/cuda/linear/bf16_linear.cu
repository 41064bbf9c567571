// x [tokens, in] times a bfloat16 weight [out, in] as it is saved, the same bits for a token however many share the call.
#include "bf16_linear_prefill.h"

namespace mlspec {
namespace {

// The fastest measured on an H200, 8192 x 8192; many tokens: as few blocks of them as possible, each reads all weights.
int variant_of(int64_t tokens) {
  if (tokens <= 8) return 112;
  if (tokens <= 16) return 212;
  if (tokens <= 32) return 412;
  if (tokens <= 64) return 822;
  if (tokens <= 128) return 1622;
  return (tokens + 287) / 288 < (tokens + 255) / 256 ? 3622 : 3222;
}

// Their outputs have the bits of the kernels above with mlspec_cuda_low_rank_added behind them.
template <int kTokenTiles>
const char* launch_adapted(const mlspec_cuda_linear& a) {
  return launch<Variant<Bf16Weights, kTokenTiles, 1, true, true>>(a);
}

template <int kTokenTiles, int kTiles>
const char* launch_bf16(const mlspec_cuda_linear& a) {
  return launch<Variant<Bf16Weights, kTokenTiles, kTiles, true>>(a);
}

}  // namespace
}  // namespace mlspec

extern "C" const char* mlspec_cuda_bf16_linear(const mlspec_cuda_linear* args) {
  using namespace mlspec;
  const mlspec_cuda_linear& a = *args;
  if (const char* problem = problem_of(a, 8)) return problem;
  if (a.activation_bits != 16) return "bfloat16 weights take 16-bit activations";
  if (a.up) {
    if (a.num_tokens > MLSPEC_CUDA_ADAPTED_TOKENS || a.variant) return "adapters are added to few tokens, by a variant of their own";
    return a.num_tokens <= 8 ? launch_adapted<1>(a) : a.num_tokens <= 16 ? launch_adapted<2>(a) : launch_adapted<4>(a);
  }
  if (!a.variant && prefill_is_faster(a)) return launch_bf16_prefill(a);
  switch (a.variant ? a.variant : variant_of(a.num_tokens)) {
    case kPrefillVariant: return launch_bf16_prefill(a);
    case 112: return launch_bf16<1, 1>(a);
    case 212: return launch_bf16<2, 1>(a);
    case 412: return launch_bf16<4, 1>(a);
    case 822: return launch_bf16<8, 2>(a);
    case 1622: return launch_bf16<16, 2>(a);
    case 3222: return launch_bf16<32, 2>(a);
    case 3622: return launch_bf16<36, 2>(a);
    default: return "no such variant of the kernel";
  }
}
