// How do the results of ranks, groups of warps and blocks become one, always in the same order?
#pragma once

#include <limits>

#include "attention_walk.cuh"

namespace mlspec {

constexpr float kInfinity = std::numeric_limits<float>::infinity();  // CUDART_INF_F is none of the host's

template <class Shape>
__device__ __forceinline__ void merge(Attended<Shape>& all, const Attended<Shape>& rank) {
#pragma unroll
  for (int i = 0; i < Shape::kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < Shape::kHalves; ++r) {
      const Merge row(all.largest[i][r], rank.largest[i][r]);
      all.largest[i][r] = row.largest;
      all.sum[i][r] = row(all.sum[i][r], rank.sum[i][r]);
#pragma unroll
      for (int n = 0; n < Shape::kOutTiles; ++n)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) all.out[i][n][e] = row(all.out[i][n][e], rank.out[i][n][e]);
    }
  }
}

// What a group has found, in shared memory: sums [rows][kOutStride], stats float4 [rows] of maximum and sum of weights.
template <class Shape>
struct Found {
  float* sums;
  float4* stats;

  __device__ __forceinline__ void write(const Attended<Shape>& state) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % kAttendWarps;
    constexpr bool kPairs = Shape::kBits == 0;  // a tile's columns are neighbours
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i)
#pragma unroll
      for (int r = 0; r < Shape::kHalves; ++r) {
        const int row = i * 16 + r * 8 + lane / 4;
        if (warp == 0 && lane % 4 == 0) stats[row] = {state.largest[i][r], state.sum[i][r], 0.f, 0.f};
        float* const to = sums + row * Shape::kOutStride;
#pragma unroll
        for (int n = 0; n < Shape::kOutTiles; n += 2 - kPairs) {
          const auto& tile = state.out[i][n];
          if constexpr (kPairs) {
            *reinterpret_cast<float2*>(to + state.element(n, 0)) = {tile[2 * r], tile[2 * r + 1]};
          } else {
            *reinterpret_cast<float2*>(to + state.element(n, 0)) = {tile[2 * r], state.out[i][n + 1][2 * r]};
            *reinterpret_cast<float2*>(to + state.element(n, 1)) = {tile[2 * r + 1], state.out[i][n + 1][2 * r + 1]};
          }
        }
      }
  }
};

// Four elements of a row: their weighted sums, the row's maximum and sum of weights.
struct Four {
  float largest, sum, x, y, z, w;

  __device__ __forceinline__ Four() : largest(-kInfinity), sum(0.f), x(0.f), y(0.f), z(0.f), w(0.f) {}
  __device__ __forceinline__ void add(float4 stats, float4 v) {
    const Merge with(largest, stats.x);
    largest = with.largest, sum = with(sum, stats.y);
    x = with(x, v.x), y = with(y, v.y), z = with(z, v.z), w = with(w, v.w);
  }
};

template <class Shape>
__device__ __forceinline__ void write_four(const AttentionArgs& a, const Tile& tile, int index, const Four& four) {
  const int row = index / (Shape::kDim / 4), element = index % (Shape::kDim / 4) * 4;
  const float share = share_of(a, tile, row, four.largest, four.sum);
  write_pair(a, tile, row, element, finished(four.x, share), finished(four.y, share));
  write_pair(a, tile, row, element + 2, finished(four.z, share), finished(four.w, share));
}

// The block's share of the tile's elements for each thread, merged group by group.
template <class Shape, int kGroups>
struct Shared {
  static constexpr int kFours = Shape::kRows * Shape::kDim / 4, kThreads = kGroups * kAttendThreads;
  static constexpr int kMine = (kFours + kThreads - 1) / kThreads;
  Four fours[kMine];

  template <class F>
  __device__ __forceinline__ void for_each(F f) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = threadIdx.x + i * kThreads;
      if (kFours % kThreads == 0 || index < kFours) f(index, fours[i]);
    }
  }
  // group_bytes: from what a group has found to the next one's.
  __device__ __forceinline__ void add(const Found<Shape>& first, int group_bytes) {
    for_each([&](int index, Four& four) {
      const int row = index / (Shape::kDim / 4), element = index % (Shape::kDim / 4) * 4;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const char* sums = reinterpret_cast<const char*>(first.sums + row * Shape::kOutStride + element) + g * group_bytes;
        const char* stats = reinterpret_cast<const char*>(first.stats + row) + g * group_bytes;
        four.add(*reinterpret_cast<const float4*>(stats), *reinterpret_cast<const float4*>(sums));
      }
    });
  }
  __device__ __forceinline__ void put(const Found<Shape>& found) {
    for_each([&](int index, Four& four) {
      const int row = index / (Shape::kDim / 4), element = index % (Shape::kDim / 4) * 4;
      *reinterpret_cast<float4*>(found.sums + row * Shape::kOutStride + element) = {four.x, four.y, four.z, four.w};
      if (element == 0) found.stats[row] = {four.largest, four.sum, 0.f, 0.f};
    });
  }
};

// Each block of the cluster merges and writes an eighth of the tile.
template <class Shape>
__device__ __forceinline__ void merge_cluster(const AttentionArgs& a, const Tile& tile, const Found<Shape>& found) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cluster_sync();
  constexpr int kFours = Shape::kRows * Shape::kDim / 4 / kTeams;
  for (int i = threadIdx.x; i < kFours; i += blockDim.x) {
    const int index = tile.team * kFours + i, row = index / (Shape::kDim / 4), element = index % (Shape::kDim / 4) * 4;
    float4 outs[kTeams], numbers[kTeams];
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      outs[team] = load_cluster(shared_address(found.sums + row * Shape::kOutStride + element), team);
      numbers[team] = load_cluster(shared_address(found.stats + row), team);
    }
    Four four;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) four.add(numbers[team], outs[team]);
    write_four<Shape>(a, tile, index, four);
  }
  cluster_exit();  // nobody leaves whose memory is still read
#endif
}

}  // namespace mlspec
