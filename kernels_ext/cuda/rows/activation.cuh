// What do the activations of a gated MLP compute, and which kernel has the one that a number names?
#pragma once

#include <type_traits>

#include "row_launch.cuh"

namespace mlspec {

enum Activation { kSilu, kGeluTanh, kGelu, kRelu, kReluSquared };  // mlspec_activation
constexpr int kPlain = -1;                           // rows as they are

template <int kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == kSilu) return x / (1.f + expf(-x));
  if constexpr (kActivation == kGeluTanh) return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  if constexpr (kActivation == kGelu) return 0.5f * x * (1.f + erff(x * 0.7071067812f));
  const float positive = x != x ? x : fmaxf(x, 0.f);  // fmaxf would lose a NaN
  return kActivation == kReluSquared ? positive * positive : positive;
}

// Of a number that only the launch knows.
__device__ __forceinline__ float activated(int activation, float x) {
  switch (activation) {
    case kSilu: return activate<kSilu>(x);
    case kGeluTanh: return activate<kGeluTanh>(x);
    case kGelu: return activate<kGelu>(x);
    case kRelu: return activate<kRelu>(x);
    default: return activate<kReluSquared>(x);
  }
}

// launch(std::integral_constant<int, activation>()).
template <class Launch>
const char* with_activation(int32_t activation, const Launch& launch) {
  switch (activation) {
    case kSilu: return launch(std::integral_constant<int, kSilu>());
    case kGeluTanh: return launch(std::integral_constant<int, kGeluTanh>());
    case kGelu: return launch(std::integral_constant<int, kGelu>());
    case kRelu: return launch(std::integral_constant<int, kRelu>());
    case kReluSquared: return launch(std::integral_constant<int, kReluSquared>());
    default: return "no such activation";
  }
}

// NaN stays NaN, which fminf and fmaxf would lose.
__device__ __forceinline__ float gated_pair(float gate, float up, float slope, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1.f) * (gate / (1.f + expf(-slope * gate)));
}

}  // namespace mlspec
