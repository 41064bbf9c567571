// Which kernels attend over keys and values that are kept as int8 codes? Those of attention.cu, compiled beside it.
#include "attention_steps.cuh"

namespace mlspec {

template const char* launch_steps<8>(const AttentionArgs&, const mlspec_cuda_attention&, const mlspec_cuda_row_launch&);

}  // namespace mlspec
