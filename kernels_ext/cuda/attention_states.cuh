// How do the results of several warps become one? In a fixed order, wherever they lie: registers, shared memory, another block.
#pragma once

#include "attention_tile.cuh"

namespace mlspec {

constexpr int kClasses = 8, kRanksOfClass = 4, kRanks = kClasses * kRanksOfClass;

// One rank's numbers behind those of the ranks before it: the same operations wherever they are done.
struct Merge {
  float largest, own, other;  // the new maximum; the factors of what is there and of what comes

  __device__ __forceinline__ Merge(float there, float comes) : largest(fmaxf(there, comes)) {
    own = weight_of(there, largest);
    other = weight_of(comes, largest);
  }
  __device__ __forceinline__ float operator()(float there, float comes) const {
    return fmaf(there, own, __fmul_rn(comes, other));
  }
  __device__ __forceinline__ float4 operator()(float4 there, float4 comes) const {
    return make_float4((*this)(there.x, comes.x), (*this)(there.y, comes.y), (*this)(there.z, comes.z), (*this)(there.w, comes.w));
  }
};

template <class Shape>
__device__ __forceinline__ int row_of(int item) {
  return Attended<Shape>::tile_of(item) * 8 + int(threadIdx.x) % 4 * 2 + Attended<Shape>::row_of(item);
}

// A merged state of one warp, its sums in shared memory: items[item][lane], this lane's.
template <class Shape>
struct Kept {
  float4* items;
  float largest[Shape::kTiles][2], sum[Shape::kTiles][2];
  bool is_empty = true;

  __device__ explicit Kept(float4* items_) : items(items_ + threadIdx.x % kWarp) {}
  __device__ __forceinline__ float4 item(int i) const { return items[i * kWarp]; }

  template <class State>
  __device__ __forceinline__ void take(const State& state) {
#pragma unroll
    for (int i = 0; i < Shape::kItems; ++i) {
      const int t = Attended<Shape>::tile_of(i), p = Attended<Shape>::row_of(i);
      items[i * kWarp] = is_empty ? state.item(i) : Merge(largest[t][p], state.largest[t][p])(item(i), state.item(i));
    }
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t)
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const Merge with(largest[t][p], state.largest[t][p]);
        sum[t][p] = is_empty ? state.sum[t][p] : with(sum[t][p], state.sum[t][p]);
        largest[t][p] = is_empty ? state.largest[t][p] : with.largest;
      }
    is_empty = false;
  }
};

// One item of several states, merged in the order they come in.
struct Merged {
  float4 out;
  float largest, sum;

  __device__ __forceinline__ static Merged none() { return {make_float4(0.f, 0.f, 0.f, 0.f), -CUDART_INF_F, 0.f}; }
  __device__ __forceinline__ void take(float2 stats, float4 item) {
    const Merge with(largest, stats.x);
    largest = with.largest;
    sum = with(sum, stats.y);
    out = with(out, item);
  }
};

// States of a tile side by side in shared memory: items float4 [states][kItems][32], stats float2 [states][kRows].
template <class Shape>
struct States {
  float4* items;
  float2* stats;

  __device__ States(void* memory, int states)
      : items(static_cast<float4*>(memory)), stats(reinterpret_cast<float2*>(items + states * Shape::kItems * kWarp)) {}
  static constexpr int kBytes = Shape::kItems * kWarp * 16 + Shape::kRows * 8;  // of one
  __device__ float4* of(int state) const { return items + state * Shape::kItems * kWarp; }

  template <class State>
  __device__ __forceinline__ void write_stats(int index, const State& state) const {
    const int lane = threadIdx.x % kWarp;
    if (lane >= 4) return;
#pragma unroll
    for (int t = 0; t < Shape::kTiles; ++t)
#pragma unroll
      for (int p = 0; p < 2; ++p)
        stats[index * Shape::kRows + t * 8 + lane * 2 + p] = make_float2(state.largest[t][p], state.sum[t][p]);
  }
  __device__ __forceinline__ void add_to(Merged& all, int state, int item) const {
    all.take(stats[state * Shape::kRows + row_of<Shape>(item)], of(state)[item * kWarp + threadIdx.x % kWarp]);
  }
};

// What the blocks of a cluster tell each other: block d merges items d, d + 8, ... of all classes.
template <class Shape>
struct Inbox {
  static constexpr int kItems = (Shape::kItems + kClasses - 1) / kClasses;  // of one block
  float4* items;  // [classes][kItems][32]
  float2* stats;

  __device__ explicit Inbox(void* memory)
      : items(static_cast<float4*>(memory)), stats(reinterpret_cast<float2*>(items + kClasses * kItems * kWarp)) {}
  static constexpr int kBytes = kClasses * kItems * kWarp * 24;
  __device__ static int place(int index, int item) {
    return (index * kItems + item / kClasses) * kWarp + int(threadIdx.x) % kWarp;
  }
  __device__ __forceinline__ void send(int from, int item, const Merged& state) const {
    const int at = place(from, item);
    store_cluster(shared_address(items + at), item % kClasses, state.out);
    store_cluster(shared_address(stats + at), item % kClasses, make_float2(state.largest, state.sum));
  }
};

}  // namespace mlspec
