// Which kernel multiplies the first planes of a weight with tables? One file for two widths, so that they compile side by side.
#pragma once

#include "../planes/planes_linear.cuh"
#include "lut_linear_format.cuh"

namespace mlspec {

template <int kPlanes>
const char* launch_lut(mlspec_cuda_linear a) {
  if (!a.stages_ahead && a.num_tokens <= 32) a.stages_ahead = kPlaneStagesAhead<kPlanes>;
  return launch_codes<LutWeights<kPlanes>>(a);
}

const char* launch_lut_1_2(const mlspec_cuda_linear& a);
const char* launch_lut_3_4(const mlspec_cuda_linear& a);
const char* launch_lut_5_6(const mlspec_cuda_linear& a);
const char* launch_lut_7_8(const mlspec_cuda_linear& a);

}  // namespace mlspec
