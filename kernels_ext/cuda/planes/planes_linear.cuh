// Which kernel multiplies the first planes of a weight? One file for two widths, so that they compile side by side.
#pragma once

#include "../linear/linear_launch.cuh"
#include "planes_linear_format.cuh"

namespace mlspec {

// Stages of few planes are small: as many bytes of weights are in flight before the first tokens as of four planes.
template <int kPlanes>
constexpr int kPlaneStagesAhead = kPlanes == 1 ? 16 : kPlanes == 2 ? 8 : kPlanes == 3 ? 6 : 4;

template <int kPlanes, int kGroupSize>
const char* launch_planes_of_group(mlspec_cuda_linear a) {
  if (!a.stages_ahead && a.num_tokens <= 32) a.stages_ahead = kPlaneStagesAhead<kPlanes>;
  return launch_codes<PlaneWeights<kPlanes, kGroupSize>>(a);
}

template <int kPlanes>
const char* launch_planes(const mlspec_cuda_linear& a) {
  switch (a.group_size) {
    case 32: return launch_planes_of_group<kPlanes, 32>(a);
    case 64: return launch_planes_of_group<kPlanes, 64>(a);
    case 128: return launch_planes_of_group<kPlanes, 128>(a);
    default: return "groups of bit-planes hold 32, 64 or 128 inputs";
  }
}

const char* launch_planes_1_2(const mlspec_cuda_linear& a);
const char* launch_planes_3_4(const mlspec_cuda_linear& a);
const char* launch_planes_5_6(const mlspec_cuda_linear& a);
const char* launch_planes_7_8(const mlspec_cuda_linear& a);

}  // namespace mlspec
