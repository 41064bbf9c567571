// What does a tile of bit-planes hold, and how do its first b planes become the registers of operand A?
//
// A tile is 64 outputs x 128 inputs: its scales [w][r][group][h], as int4's, then plane 0 (the most significant), plane 1 and
// so on, 1 KiB each: b planes are a prefix of the tile. A plane is [w 4][lane 32][half tile 2] x one word: 16 registers of operand A,
// a[0..3] of four steps, one bit of their even inputs in the lower half of the word, of their odd ones in the upper.
// Register i = step % 4 + 4 a has its bit of plane p at bit (i - p) mod 32 (odd inputs: + 16): one plane further is one bit
// further right, so a code stands in one piece, its highest bit at bit i, in any word that takes
// from plane p the bits i - p, for every i = c mod F. Such a word serves 16 / F registers; F words serve all, and are made of
// the planes by log2 F rounds of bit selections without a shift. F is the power of two that is at least b.
// As bits of a bfloat16 the lower 8 are an integer times 2^-133, exactly: one fused multiply-add makes two weights
//   (code_b + code_offset) / 64,   code_offset = ((2^(B - b) - 1) / 2 - zero_doubled / 2) / 2^(B - b)
// and the outputs are multiplied by 64 * 2^(B - b): see formats/planes/codes.py.
#pragma once

#include "../linear/linear.h"
#include "../linear/linear_formats.cuh"

namespace mlspec {

// Null, or what is wrong with the weight.
inline const char* problem_of_planes(const mlspec_cuda_linear& a) {
  if (!is_group_size(a.group_size)) return "groups of bit-planes hold 32, 64 or 128 inputs";
  if (a.in_features % a.group_size) return "in_features must be whole groups";
  if (a.activation_bits != 16) return "activation_bits of bit-planes must be 16";
  const int bytes = a.tile_stride - kTileOutputs * (kTileInputs / a.group_size) * 2, stored = bytes / kPlaneBytes;
  if (bytes % kPlaneBytes || stored < 1 || stored > kMaxPlanes) return "tile_stride is not that of 1 to 8 planes and their scales";
  if (a.absent_planes < 0 || stored + a.absent_planes > kMaxPlanes) return "stored and absent planes must be 8 at most";
  if (a.num_apart < 0 || a.num_apart > a.absent_planes) return "planes that lie apart must be some that the tiles do not store";
  if (a.num_planes < 1 || (a.num_apart ? a.num_planes != stored + a.num_apart : a.num_planes > stored))
    return "num_planes must be 1 to the number of stored planes, or those and all that lie apart";
  for (int i = 0; i < a.num_apart; ++i)
    if (reinterpret_cast<uintptr_t>(a.apart[i]) % 16) return "planes that lie apart must start at a multiple of 16 bytes";
  if (a.zero_doubled < (stored + a.absent_planes == kMaxPlanes ? 254 : 0) || a.zero_doubled > 256)
    return "zero_doubled must be 0 to 256, of 8 planes 254 to 256: weights are then exact in bfloat16";
  return nullptr;
}

// mask ? a : b, bit by bit.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "n"(kMask), "r"(a), "r"(b));
  return d;
}

// Bits k with k % (2 kWidth) < kWidth.
template <int kWidth>
constexpr uint32_t kStripes = kWidth == 1 ? 0x55555555 : kWidth == 2 ? 0x33333333 : 0x0F0F0F0F;

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(uint32_t(exponent + 127) << 23); }

// A lane's planes of a tile, and the words whose bits are whole codes.
template <int kPlanesOf>
struct PlaneWords {
  static constexpr int kPlanes = kPlanesOf;
  static constexpr int kFields = kPlanes == 1 ? 1 : kPlanes == 2 ? 2 : kPlanes <= 4 ? 4 : 8;  // F
  uint32_t planes[kPlanes][2];

  __device__ __forceinline__ static uint32_t place(int warp, int lane) { return (warp * 32 + lane) * 8; }

  // Of the planes p, p + kStep, p + 2 kStep ...: what the word of the registers i = c mod F takes from them.
  template <int kStep, int kFirst>
  __device__ __forceinline__ uint32_t merged(int c, int half) const {
    if constexpr (kStep == kFields) {
      return planes[kFirst][half];
    } else if constexpr (kFirst + kStep >= kPlanes) {
      return merged<2 * kStep, kFirst>(c, half);
    } else {
      const uint32_t first = merged<2 * kStep, kFirst>(c, half), second = merged<2 * kStep, kFirst + kStep>(c, half);
      const bool first_is_low = (c - kFirst + kFields) % (2 * kStep) < kStep;
      return first_is_low ? select_bits<kStripes<kStep>>(first, second) : select_bits<kStripes<kStep>>(second, first);
    }
  }
  __device__ __forceinline__ uint32_t word_of(int c, int half) const { return merged<1, 0>(c, half); }
};

// x rotated left; what is rotated is known when compiled.
__device__ __forceinline__ uint32_t rotated(uint32_t x, int by) { return by == 0 ? x : x << by | x >> (32 - by); }

// The first kPlanes planes of any number of stored ones. Scales are applied to the float32 sum of a group.
template <int kPlanesOf, int kGroupSize>
struct PlaneWeights : PlaneWords<kPlanesOf>, PackedTiles {
  using Words = PlaneWords<kPlanesOf>;
  static constexpr int kPlanes = kPlanesOf, kFields = Words::kFields;
  static constexpr int kGroups = kTileInputs / kGroupSize, kActivationBits = 16;
  static constexpr bool kPrefix = true, kApart = true;
  static constexpr float kOutScale = 64;  // and out_scale
  static constexpr int kScaleBytes = kTileOutputs * kGroups * 2;
  static constexpr int kTileBytes = kScaleBytes + kPlanes * kPlaneBytes;
  static constexpr int kTurn = kPlanes <= 2 && kGroups == 1 ? 4 : kPlanes >= 4 && kGroups == 4 ? 1 : 2;  // as registers allow
  static constexpr int kScalesOfRow = kGroups * 2;

  const half* scales;
  uint32_t code_offset;

  __device__ __forceinline__ static LanePlace place(int warp, int lane) {
    return {Words::place(warp, lane), uint32_t(warp * 8 + lane / 4) * kScalesOfRow};
  }
  // Planes that are not read, stored or absent.
  template <class Params>
  __device__ __forceinline__ static int missing(const Params& p) {
    return (p.tile_stride - kScaleBytes) / kPlaneBytes + p.absent_planes - kPlanes;
  }
  template <class Params>
  __device__ __forceinline__ static float out_scale(const Params& p) {
    return power_of_two(missing(p));
  }
  template <class Params>
  __device__ __forceinline__ void prepare(const Params& p) {
    const int step = 1 << missing(p);
    const float offset = float(step - 1 - p.zero_doubled) * power_of_two(-missing(p) - 7);
    code_offset = unknown_to_compiler((__float_as_uint(offset) >> 16) * 0x10001u);
  }
  __device__ __forceinline__ void load(const uint8_t* tile, LanePlace place) {
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      const uint2 v = *reinterpret_cast<const uint2*>(tile + kScaleBytes + p * kPlaneBytes + place.weights);
      this->planes[p][0] = v.x, this->planes[p][1] = v.y;
    }
    scales = reinterpret_cast<const half*>(tile + place.scales * 2);
  }
  // Of rows r and r + 8.
  __device__ __forceinline__ float2 scale(int group) const {
    return __half22float2(reinterpret_cast<const half2*>(scales)[group]);
  }
  // The word of register i rotated so that its code, and that of other registers, lies within the lower 8 bits of each half:
  // its highest bit comes to i % 8 + shift(i). Beyond bit 7 no code wraps around.
  __device__ __forceinline__ static constexpr int shift(int i) {
    return i % kFields < kPlanes - 1 ? kPlanes - 1 - i % kFields : 0;
  }
  __device__ __forceinline__ uint32_t codes(int i, int half, uint32_t mask) const {
    const uint32_t word = this->word_of(i % kFields, half);
    if (i < 8) return rotated(word, shift(i)) & mask;
    if constexpr (kPlanes == 8) return __byte_perm(rotated(word, shift(i)), 0, 0x4341);
    return word >> (8 - shift(i)) & mask;
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = step % 4 + 4 * k, lowest = i % 8 + shift(i) - (kPlanes - 1);
      const uint32_t mask = both(((1u << kPlanes) - 1) << lowest), power = both(uint32_t(254 - lowest) << 7);
      a[k] = bf16x2_fma(codes(i, step / 4, mask), power, code_offset);
    }
  }
};

// The same tiles where one kernel serves every number of planes up to kMost: planes that are not read are zero bits.
template <int kGroupSize, int kMost = 8>
struct AnyPlaneWeights : PlaneWords<8>, PackedTiles {
  using Eight = PlaneWeights<8, kGroupSize>;
  static constexpr int kGroups = Eight::kGroups, kActivationBits = 16;
  static constexpr bool kPrefix = true, kApart = true;
  static constexpr float kOutScale = 64;  // and out_scale
  static constexpr int kScaleBytes = Eight::kScaleBytes;
  static constexpr int kTileBytes = kScaleBytes + kMost * kPlaneBytes;  // at most

  const half* scales;
  uint32_t code_offset;
  int num_planes;

  template <class Params>
  __device__ __forceinline__ static int bytes_read(const Params& p) {
    return Eight::kScaleBytes + p.num_planes * kPlaneBytes;
  }
  // The codes come as 8 bits: of a weight of B planes, 8 - B of them were never there.
  template <class Params>
  __device__ __forceinline__ static int never_there(const Params& p) {
    return 8 - p.absent_planes - (p.tile_stride - Eight::kScaleBytes) / kPlaneBytes;
  }
  template <class Params>
  __device__ __forceinline__ static float out_scale(const Params& p) {
    return power_of_two(-never_there(p));
  }
  template <class Params>
  __device__ __forceinline__ void prepare(const Params& p) {
    num_planes = p.num_planes;
    const int unread = 8 - never_there(p) - num_planes;
    const float offset = float((1 << unread) - 1 - p.zero_doubled) * power_of_two(never_there(p) - 7);
    code_offset = (__float_as_uint(offset) >> 16) * 0x10001u;
  }
  __device__ __forceinline__ static LanePlace place(int warp, int lane) { return Eight::place(warp, lane); }
  __device__ __forceinline__ void load(const uint8_t* tile, LanePlace place) {
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      uint2 v = {0, 0};
      if (p < kMost && p < num_planes) v = *reinterpret_cast<const uint2*>(tile + Eight::kScaleBytes + p * kPlaneBytes + place.weights);
      planes[p][0] = v.x, planes[p][1] = v.y;
    }
    scales = reinterpret_cast<const half*>(tile + place.scales * 2);
  }
  __device__ __forceinline__ float2 scale(int group) const {
    return __half22float2(reinterpret_cast<const half2*>(scales)[group]);
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = step % 4 + 4 * k;
      const uint32_t word = rotated(word_of(i % 8, step / 4), 7 - i % 8), codes = (i < 8 ? word : word >> 8) & 0x00FF00FF;
      a[k] = bf16x2_fma(codes, 0x7F007F00, code_offset);  // 2^127
    }
  }
};

}  // namespace mlspec
