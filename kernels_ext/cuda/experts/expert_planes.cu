// Rows times the first bit-planes of the experts that they were sent to, bfloat16 activations.
#include "../planes/planes_linear_format.cuh"
#include "expert_linear.cuh"

namespace mlspec::portable {

template <int kGroupSize>
constexpr int kMostTokenTiles<AnyPlaneWeights<kGroupSize, 8>> = 4;

// Rings of up to four planes hold more stages, and more blocks share a multiprocessor.
template <int kGroupSize>
const char* launch_planes_of_experts(const mlspec_cuda_expert_linear& a) {
  if (a.linear.num_planes <= 4) return launch_rows_of_experts<AnyPlaneWeights<kGroupSize, 4>>(a);
  return launch_rows_of_experts<AnyPlaneWeights<kGroupSize, 8>>(a);
}

}  // namespace mlspec::portable

extern "C" const char* mlspec_cuda_plane_experts(const mlspec_cuda_expert_linear* args) {
  using mlspec::portable::launch_planes_of_experts;
  if (const char* problem = mlspec::problem_of_planes(args->linear)) return problem;
  if (args->linear.num_apart || args->linear.absent_planes) return "experts have all of their planes in one place";
  switch (args->linear.group_size) {
    case 32: return launch_planes_of_experts<32>(*args);
    case 64: return launch_planes_of_experts<64>(*args);
    default: return launch_planes_of_experts<128>(*args);
  }
}
