// How do the tokens of a step attend over their rows of a ragged cache? Lengths are read on the device; cost follows them.
#include "attention_steps.cuh"

using namespace mlspec;

const char* mlspec_cuda_ragged_attention_rows(const mlspec_cuda_attention* attention, const mlspec_cuda_tokens* tokens,
                                              const mlspec_cuda_cache* cache, const mlspec_cuda_row_launch* how) {
  AttentionArgs args;
  if (const char* problem = read_arguments(&args, *attention, *tokens, *cache)) return problem;
  if (attention->teams != 0 && attention->teams != 1 && attention->teams != kTeams) return "teams must be 0, 1 or 8";
  if (cache->code_bits == 4) return launch_steps<4>(args, *attention, *how);
  return cache->code_bits == 8 ? launch_steps<8>(args, *attention, *how) : launch_steps<0>(args, *attention, *how);
}
