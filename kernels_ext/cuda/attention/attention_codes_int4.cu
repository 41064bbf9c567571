// Which kernels attend over keys and values that are kept as int4 codes? Those of attention.cu, compiled beside it.
#include "attention_steps.cuh"

namespace mlspec {

template const char* launch_steps<4>(const AttentionArgs&, const mlspec_cuda_attention&, const mlspec_cuda_row_launch&);

}  // namespace mlspec
