// How does one kernel multiply as many planes as a number on the device says? Every number has its own code, and a block runs one.
//
// Where tokens differ in their numbers, each number that occurs has a share of the grid, which multiplies all tokens and writes
// its own: the bits of a token are those of a product at its number alone. Blocks of numbers that do not occur end at once.
#pragma once

#include "../linear/linear_launch.cuh"
#include "planes_linear.cuh"

namespace mlspec {

struct ChosenParams {
  LinearParams of[kMaxPlanes];  // by planes - 1
  const int32_t* widths;
  int num_widths, num_planes, clusters, ranks;
};

// The number-th of the widths that occur, the smallest first; 0: there are fewer.
__device__ __forceinline__ int width_of_share(const ChosenParams& c, int number) {
  if (c.num_widths == 1) return min(max(*c.widths, 1), c.num_planes);
  uint32_t occur = 0;
  for (int i = int(threadIdx.x) % 32; i < c.num_widths; i += 32) occur |= 1u << min(max(c.widths[i], 1), c.num_planes);
  occur = __reduce_or_sync(~0u, occur);
  for (int i = 0; i < number; ++i) occur &= occur - 1;
  return occur ? __ffs(int(occur)) - 1 : 0;
}

template <int kGroupSize, int kTokenTiles, int kTiles, bool kWgmma>
struct ChosenVariants {
  template <int kPlanes>
  using Of = Variant<PlaneWeights<kPlanes, kGroupSize>, kTokenTiles, kTiles, kWgmma>;
  static constexpr int kThreads = Of<8>::kThreads, kBlocks = Of<8>::kBlocks;
};

template <class Variants>
__global__ void __launch_bounds__(Variants::kThreads, Variants::kBlocks)
    chosen_kernel(const __grid_constant__ Maps maps, const __grid_constant__ ChosenParams c) {
  const int cluster = int(blockIdx.x) / c.ranks, rank = int(blockIdx.x) % c.ranks;
  launch_dependents();
  wait_for_previous_kernel();  // which may have written the widths
  const int width = width_of_share(c, cluster / c.clusters), own = cluster % c.clusters;
#define MLSPEC_OF_WIDTH(planes) \
  case planes: return linear_block<typename Variants::template Of<planes>>(maps, c.of[planes - 1], own, c.clusters, rank);
  switch (width) {
    MLSPEC_OF_WIDTH(1)
    MLSPEC_OF_WIDTH(2)
    MLSPEC_OF_WIDTH(3)
    MLSPEC_OF_WIDTH(4)
    MLSPEC_OF_WIDTH(5)
    MLSPEC_OF_WIDTH(6)
    MLSPEC_OF_WIDTH(7)
    MLSPEC_OF_WIDTH(8)
  }
#undef MLSPEC_OF_WIDTH
}

// What the kernel is told of the first kPlanes planes, and the most bytes of shared memory so far.
template <class Variants, int kPlanes>
const char* plan_width(ChosenParams* c, int* shared, mlspec_cuda_linear a) {
  if constexpr (kPlanes > 1)
    if (const char* problem = plan_width<Variants, kPlanes - 1>(c, shared, a)) return problem;
  if (kPlanes > c->num_planes) return nullptr;
  if (!a.stages_ahead && a.num_tokens <= 32) a.stages_ahead = kPlaneStagesAhead<kPlanes>;
  a.num_apart = kPlanes - (c->num_planes - a.num_apart);  // of the planes that lie apart those that are read
  if (a.num_apart < 0) a.num_apart = 0;
  a.num_planes = kPlanes;
  LinearParams& own = c->of[kPlanes - 1];
  const int needed = plan<typename Variants::template Of<kPlanes>>(&own, a, true);
  if (needed == 0) return "the ring is smaller than one turn of all groups of warps";
  own.widths = a.num_widths == 1 ? nullptr : a.widths, own.width = kPlanes;
  if (needed > *shared) *shared = needed;
  return nullptr;
}

template <class Variants>
const char* launch_chosen(const mlspec_cuda_linear& a, int num_planes) {
  using V = typename Variants::template Of<8>;
  ChosenParams c = {};
  c.widths = a.widths, c.num_widths = int(a.num_widths), c.num_planes = num_planes;
  int shared = 0;
  if (const char* problem = plan_width<Variants, kMaxPlanes>(&c, &shared, a)) return problem;
  const LinearParams& any = c.of[0];
  c.ranks = any.ranks;
  constexpr int kPlaces = kMultiprocessors * V::kBlocks, kMostTurn = 4;  // whole turns of every number of planes
  const bool runs_on = V::kOwnSums && c.ranks == 1 && any.chunks % (kMostTurn * V::kWarpGroups) == 0;
  c.clusters = runs_on && any.units > kPlaces ? kPlaces : any.units;
  Maps maps = {};
  if (const char* problem = describe_operands<V>(&maps, a)) return problem;
  const int64_t most = a.num_widths < num_planes ? a.num_widths : num_planes;
  return launch_blocks(a, int(most) * c.ranks * c.clusters, c.ranks, V::kThreads, shared, chosen_kernel<Variants>, maps, c);
}

template <int kGroupSize>
const char* launch_chosen_of_group(const mlspec_cuda_linear& a, int num_planes) {
  if (a.num_tokens <= 8) return launch_chosen<ChosenVariants<kGroupSize, 1, 1, false>>(a, num_planes);
  if (a.num_tokens <= 32) return launch_chosen<ChosenVariants<kGroupSize, 4, 1, true>>(a, num_planes);
  return launch_chosen<ChosenVariants<kGroupSize, 8, 2, true>>(a, num_planes);
}

const char* launch_chosen_32(const mlspec_cuda_linear& a, int num_planes);
const char* launch_chosen_64(const mlspec_cuda_linear& a, int num_planes);
const char* launch_chosen_128(const mlspec_cuda_linear& a, int num_planes);

}  // namespace mlspec
