// What do the tiles of nested BF16 weights hold, and how do they become registers of operand A: the draft, and the exact weight?
//
// Eight weights of a lane, one step of 16 inputs: number 4 h + k is register h + 2 (k % 2), half k / 2, so that four numbers
// share a row. A word of nibbles holds the index of number i at bits 4 i .. 4 i + 2, the sign of number k at bit 8 k + 7, of
// number 4 + k at bit 8 k + 3: as selectors of a byte permutation the indices look up four magnitudes at once, and the signs are
// the highest bits of four bytes. A second array holds the 12 bits v of the exact weights in three parts of the shape of the
// nibbles: low bytes of steps 4 f, 4 f + 1, those of 4 f + 2, 4 f + 3 (per step a word of row r and one of row r + 8), and words
// of high nibbles, number k in the low half of byte k, number 4 + k in the high half. hf_mlspec/ops/nested/tiles_cuda.py packs.
//
// A magnitude of the codebook is an integer below 64: as bits of a bfloat16 that integer times 2^-133, exactly. A scale byte is
// the exponent of 2^(S + 1 - shift), so that the product is units * 2^(S - 132 - shift); the outputs are multiplied by 2^shift.
// v as a bfloat16 times 2^base = 2^(S - 31) is the exact magnitude: that exponent is the scale byte - 32 + shift.
#pragma once

#include "../linear/linear.h"
#include "../linear/linear_formats.cuh"

namespace mlspec {

// Null, or what is wrong with the weight.
inline const char* problem_of_nested(const mlspec_cuda_linear& a) {
  if (!a.exponent_shift) return "nested weights need the exponent shift that prepack wrote";
  if (a.weight_bits == 4) return a.codebook ? nullptr : "the draft of nested weights needs its codebook";
  if (a.weight_bits != 16) return "weight_bits of nested weights must be 16 or 4";
  if (a.activation_bits != 16) return "exact nested weights take 16-bit activations";
  return a.more ? nullptr : "exact nested weights need the tiles of their low bits";
}

// The two pairs of a row from the low and high bytes of its four numbers.
__device__ __forceinline__ uint32_t first_pair(uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x6240); }
__device__ __forceinline__ uint32_t second_pair(uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x7351); }

constexpr uint32_t kIndexBits = 0x77777777, kSignBits = 0x80808080, kLowNibbles = 0x0F0F0F0F;

template <class Params>
__device__ __forceinline__ void load_codebook(uint32_t (&table)[2], const Params& p) {
  const int32_t* from = reinterpret_cast<const int32_t*>(p.codebook);
  table[0] = load_constant(from), table[1] = load_constant(from + 1);
}

struct NestedDraftWeights : ScaledCodes {
  uint32_t table[2], two_to_16;

  template <class Params>
  __device__ __forceinline__ void prepare(const Params& p) {
    load_codebook(table, p);
    two_to_16 = unknown_to_compiler(1 << 16);
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const uint32_t w = words[step], index = w & kIndexBits, both_rows = rows_scale(scales[step / 4], step);
    const uint32_t even = both_low(both_rows), odd = both_high(both_rows);
    const uint32_t units = looked_up(table, index), signs = w & kSignBits;
    const uint32_t units8 = looked_up(table, multiplied_high(index, two_to_16)), signs8 = (w << 4) & kSignBits;  // of row r + 8
    a[0] = bf16x2_mul(first_pair(units, signs), even), a[2] = bf16x2_mul(second_pair(units, signs), even);
    a[1] = bf16x2_mul(first_pair(units8, signs8), odd), a[3] = bf16x2_mul(second_pair(units8, signs8), odd);
  }
};

// The same tiles for int8 activations, whose every 16 inputs come in the order of the numbers.
struct NestedIntegerWeights : ScaledIntegers {
  static constexpr float kOutScale = 0x1p-32f;  // scales are larger by as much, away from what is too small for a number

  uint32_t table[2], flips[2];  // flip: positive ^ negative

  template <class Params>
  __device__ __forceinline__ void prepare(const Params& p) {
    load_codebook(table, p);
#pragma unroll
    for (int i = 0; i < 2; ++i) flips[i] = table[i] ^ (kSignBits - table[i]) ^ kSignBits;
  }
  __device__ __forceinline__ float2 scale(int block) const { return powers(block, 0x1p-101f); }
  // selectors: indices of four numbers; signs: theirs, the highest bits of four bytes.
  __device__ __forceinline__ uint32_t signed_units(uint32_t selectors, uint32_t signs) const {
    const uint32_t positive = looked_up(table, selectors), flip = looked_up(flips, selectors);
    uint32_t negative;  // 0xFF where it is
    asm("prmt.b32 %0, %1, %1, 0xBA98;" : "=r"(negative) : "r"(signs));
    return positive ^ (flip & negative);
  }
  // A step is 32 inputs: two words, each row r of a[0], a[2] and row r + 8 of a[1], a[3].
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t w = words[2 * step + i], index = w & kIndexBits;
      a[2 * i] = signed_units(index, w), a[2 * i + 1] = signed_units(index >> 16, w << 4);
    }
  }
};

// Four registers of exact weights from nibbles, low bytes of rows r and r + 8, high nibbles and both rows' 2^base.
__device__ __forceinline__ void join_fields(uint32_t (&a)[4], uint32_t nibbles, uint32_t low, uint32_t low8, uint32_t high,
                                            uint32_t both_rows) {
  const uint32_t even = both_low(both_rows), odd = both_high(both_rows);
  const uint32_t top = (high & kLowNibbles) | (nibbles & kSignBits);
  const uint32_t top8 = ((high >> 4) & kLowNibbles) | ((nibbles << 4) & kSignBits);
  a[0] = bf16x2_mul(first_pair(low, top), even), a[2] = bf16x2_mul(second_pair(low, top), even);
  a[1] = bf16x2_mul(first_pair(low8, top8), odd), a[3] = bf16x2_mul(second_pair(low8, top8), odd);
}

// From the exponents of the draft's scales to those of 2^base, four bytes at once: none is smaller than what is taken away.
template <class Params>
__device__ __forceinline__ uint32_t draft_exponents_beyond(const Params& p) {
  return (32 - load_constant(p.exponent_shift)) * 0x01010101u;
}

struct NestedExactWeights : ScaledCodes {
  static constexpr bool kHasShift = false;
  static constexpr int kWarpGroups = 1;  // the order of sums of bf16_linear
  static constexpr int kMoreBytes = kFieldBytes;

  uint32_t low[2][kSteps], high[kSteps], beyond;

  template <class Params>
  __device__ __forceinline__ void prepare(const Params& p) {
    beyond = draft_exponents_beyond(p);
  }
  __device__ __forceinline__ void load(const uint8_t* tile, const uint8_t* fields, LanePlace place) {
    ScaledCodes::load(tile, place);
    scales[0] -= beyond, scales[1] -= beyond;
    load_words(low[0], fields + place.weights);
    load_words(low[1], fields + kCodeBytes + place.weights);
    load_words(high, fields + 2 * kCodeBytes + place.weights);
  }
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const int row = step / 4 * 4 + step % 2 * 2;
    const uint32_t(&of_pair)[kSteps] = low[step / 2 % 2];
    join_fields(a, words[step], of_pair[row], of_pair[row + 1], high[step], rows_scale(scales[step / 4], step));
  }
};

}  // namespace mlspec
