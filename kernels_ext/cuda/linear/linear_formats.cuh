// What does a tile of packed 4-bit weights hold, and how does it become the registers of operand A?
//
// A tile is 64 outputs x 128 inputs, one piece of memory; tiles lie [output tile pair, input tile, m of the pair].
// Output row of a tile = 16 w + 8 h + r: w the warp of four, h and r as operand A has them.
//   [w 4][four steps 2][lane 32][step 4] x one word: a[0..3] of 16 inputs, 2 codes of 4 bits each; behind them the scales
//   (and zero points), those of a lane's rows side by side: [w 4][r 8][group][h]
// bfloat16 weights are not packed: boxes of 64 outputs x 64 inputs of the saved weight, multiplied from shared memory.
// A word of int4 holds code ^ 8 (that is code - 8 in two's complement) of a[i] at bits 4i (even input) and 16 + 4i (odd).
// As bits of a bfloat16 the lower 8 are an integer times 2^-133, exactly, so one fused multiply-add makes two weights.
// For int8 activations the same word is four codes of row r (even nibbles) and four of row r + 8; their inputs are 2q,
// 2q + 8, 2q + 1, 2q + 9, so int8 activations come with every 16 inputs in the order 0 8 1 9 2 10 .. 7 15.
// A word of MXFP4 has the bits of a code where few instructions bring them to a bfloat16's sign and bits 8..6: drawn below.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../../formats.h"
#include "../ptx.cuh"

namespace mlspec {

using namespace gpu_tiles;

constexpr int kSteps = kTileInputs / 16;

__device__ __forceinline__ uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ uint32_t bf16x2_mul(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return bf16x2_fma(a, b, 0x80008000);  // plus -0: the product, with its sign, where there is no multiplication
#else
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#endif
}

// One half in both: the multiplication then reads that half, without an instruction.
__device__ __forceinline__ uint32_t both_low(uint32_t halves) {
  uint32_t d;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(d) : "r"(halves));
  return d;
}

__device__ __forceinline__ uint32_t both_high(uint32_t halves) {
  uint32_t d;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(d) : "r"(halves));
  return d;
}

// (bits & mask) ^ flip in one instruction: the compiler takes two where mask and flip are known to it.
__device__ __forceinline__ uint32_t and_xor(uint32_t bits, uint32_t mask, uint32_t flip) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(bits), "r"(mask), "r"(flip));
  return d;
}

// Four bytes of eight, first those of `low`, by selectors below 8. The compiler would mask them once more in front of __byte_perm.
__device__ __forceinline__ uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selectors));
  return d;
}

__device__ __forceinline__ uint32_t looked_up(const uint32_t (&table)[2], uint32_t selectors) {
  return bytes_of(table[0], table[1], selectors);
}

// a * b >> 32 and a * b + c on the pipe of multiplications, for formats that keep that of shifts, logic and permutations busy: b is
// a power of two unknown to the compiler.
__device__ __forceinline__ uint32_t multiplied_high(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.hi.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t multiplied_sum(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Here and now: the compiler moves it neither behind what waits nor to where it is used.
__device__ __forceinline__ uint32_t load_constant(const int32_t* from) {
  uint32_t d;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(d) : "l"(from));
  return d;
}

// Where a lane's weights and scales begin in a tile, bytes. Kept in registers: computed once, not once a chunk.
struct LanePlace {
  uint32_t weights, scales;
};

struct Bf16Weights {
  static constexpr int kGroups = 0;  // no late scaling
  static constexpr bool kPacked = false, kHasZeros = false, kHasShift = false, kPrefix = false, kTables = false;
  static constexpr bool kOutliers = false, kApart = false;
  static constexpr int kWarpGroups = 1, kMoreBytes = 0, kTableBytes = 0, kTurn = 1;
  static constexpr int kActivationBits = 16;
  static constexpr float kOutScale = 1;
  static constexpr int kChunk = 64, kTileBytes = kTileOutputs * kChunk * 2;  // rows of 128 bytes, 128-byte swizzle
};


// What the ring and the loop over chunks ask of weights that are packed in tiles and multiplied from registers, unless a format
// says otherwise.
struct PackedTiles {
  static constexpr bool kPacked = true, kHasZeros = false, kHasShift = false;
  static constexpr int kChunk = kTileInputs;
  static constexpr int kWarpGroups = 2;       // that share a tile's chunks: part of the order of the sums
  static constexpr bool kTables = false;      // begin() reads what belongs to a tile's outputs, for each tile
  static constexpr int kTableBytes = 0;       // of a tile, that begin() writes to shared memory
  static constexpr bool kPrefix = false;      // kTileBytes are the front of what a tile stores, LinearParams::tile_stride
  static constexpr bool kApart = false;       // the last planes of a tile may lie in other arrays, LinearParams::apart
  static constexpr bool kOutliers = false;    // the last chunks may meet the same tokens, LinearParams::token_chunks
  static constexpr int kMoreBytes = 0;        // of a tile in a second array, LinearParams::more; behind the first in a stage
  static constexpr int kTurn = 2;             // chunks that a group of warps takes at once where it multiplies by mma
};

// Bits of a pair of bfloat16.
__device__ __forceinline__ uint32_t both(uint32_t half_word) { return half_word * 0x10001u; }

// What a lane has of a part of a tile: [w 4][four steps 2][lane 32][step 4] words.
__device__ __forceinline__ void load_words(uint32_t (&words)[kSteps], const uint8_t* from) {
#pragma unroll
  for (int i = 0; i < kSteps; i += 4) {
    const uint4 v = reinterpret_cast<const uint4*>(from)[i * 8];
    words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
  }
}

struct CodeWords : PackedTiles {
  uint32_t words[kSteps];

  __device__ __forceinline__ static uint32_t place(int warp, int lane) { return (warp * kSteps / 4 * 32 + lane) * 16; }
  __device__ __forceinline__ void load(const uint8_t* tile, uint32_t place) { load_words(words, tile + place); }
};

// kBits: of the activations. Scales are applied to the float32 (int32) sum of a group.
template <int kGroupSize, bool kZeros, int kBits>
struct Int4Weights : CodeWords {
  static constexpr int kGroups = kTileInputs / kGroupSize;
  static constexpr int kActivationBits = kBits;
  static constexpr float kOutScale = kBits == 16 ? 64.0f : 1.0f / 16;  // weights are multiplied as (code - zero) / 64
  static constexpr bool kHasZeros = kZeros, kHasShift = false, kOutliers = kGroupSize == kTileInputs;
  static constexpr int kScaleBytes = kTileOutputs * kGroups * 2;
  static constexpr int kTileBytes = kCodeBytes + kScaleBytes + (kZeros ? kScaleBytes / 2 : 0);
  static constexpr int kScalesOfRow = kGroups * 2;

  const half* scales;
  const uint8_t* zeros;
  uint32_t flip_low, flip_high;  // 8 and 0x80 in both halves, unknown to the compiler

  __device__ __forceinline__ static LanePlace place(int warp, int lane) {
    return {CodeWords::place(warp, lane), uint32_t(warp * 8 + lane / 4) * kScalesOfRow};
  }
  template <class Params>
  __device__ __forceinline__ void prepare(const Params&) {
    flip_low = unknown_to_compiler(0x00080008), flip_high = unknown_to_compiler(0x00800080);
  }
  __device__ __forceinline__ void load(const uint8_t* tile, LanePlace place) {
    CodeWords::load(tile, place.weights);
    scales = reinterpret_cast<const half*>(tile + kCodeBytes + place.scales * 2);
    zeros = tile + kCodeBytes + kScaleBytes + place.scales;
  }
  // Of rows r and r + 8.
  __device__ __forceinline__ float2 scale(int group) const {
    return __half22float2(reinterpret_cast<const half2*>(scales)[group]);
  }
  __device__ __forceinline__ uchar2 zero(int group) const {
    return reinterpret_cast<const uchar2*>(zeros)[group];
  }
  // 16 bits: a step is 16 inputs; a code at bits 0..3 or 4..7 is worth 2^-133 or 2^-129, and becomes (code - zero) / 64.
  // 8 bits: a step is 32 inputs; 16 (code - 8).
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    if constexpr (kBits == 16) {
      const uint32_t w = words[step];
      constexpr uint32_t kPower127 = 0x7F007F00, kPower123 = 0x7D007D00, kMinusPower127 = 0xFF00FF00;
      uint32_t even = 0xBE00BE00, odd = 0xBE00BE00;  // -8 / 64
      if constexpr (kZeros) {
        const uchar2 z = zero(step * 16 / kGroupSize);
        even = bf16x2_mul(both(z.x), kMinusPower127), odd = bf16x2_mul(both(z.y), kMinusPower127);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t codes = w >> 4 * i;
        a[i] = bf16x2_fma(and_xor(codes, 0x000F000F, flip_low), kPower127, even);
        a[i + 1] = bf16x2_fma(and_xor(codes, 0x00F000F0, flip_high), kPower123, odd);
      }
    } else {
      const uint32_t low = words[2 * step], high = words[2 * step + 1];
      a[0] = (low << 4) & 0xF0F0F0F0, a[1] = low & 0xF0F0F0F0;
      a[2] = (high << 4) & 0xF0F0F0F0, a[3] = high & 0xF0F0F0F0;
    }
  }
};

// Codes with a scale of one byte per 32 inputs, stored as the exponent of a number: bytes [w][r][pair of blocks][h][block % 2]
// behind the codes.
constexpr int kBlocks = kTileInputs / kBlock;
constexpr int kScaledTileBytes = kCodeBytes + kTileOutputs * kBlocks;

__device__ __forceinline__ LanePlace place_of_scaled(int warp, int lane) {
  return {CodeWords::place(warp, lane), uint32_t(warp * 8 + lane / 4) * 8};
}

// A scale times a bfloat16 weight, of which it is a power of two: exact.
struct ScaledCodes : CodeWords {
  static constexpr int kGroups = 0;
  static constexpr int kActivationBits = 16;
  static constexpr bool kHasShift = true;
  static constexpr float kOutScale = 1;
  static constexpr int kTileBytes = kScaledTileBytes;

  uint32_t scales[kBlocks / 2];

  __device__ __forceinline__ static LanePlace place(int warp, int lane) { return place_of_scaled(warp, lane); }
  template <class Params>
  __device__ __forceinline__ void prepare(const Params&) {}
  __device__ __forceinline__ void load(const uint8_t* tile, LanePlace place) {
    CodeWords::load(tile, place.weights);
    const uint2 v = *reinterpret_cast<const uint2*>(tile + kCodeBytes + place.scales);
    scales[0] = v.x, scales[1] = v.y;
  }
  // Of rows r and r + 8 as the halves of a word; blocks: two of both rows.
  __device__ __forceinline__ static uint32_t rows_scale(uint32_t blocks, int step) {
    return (step / 2 % 2 ? blocks >> 1 : blocks << 7) & 0x7F807F80;
  }
};

// A scale times the integer sum of a block.
struct ScaledIntegers : CodeWords {
  static constexpr int kGroups = kBlocks;
  static constexpr int kActivationBits = 8;
  static constexpr bool kHasShift = true;
  static constexpr int kTileBytes = kScaledTileBytes;

  const uint8_t* scales;

  __device__ __forceinline__ static LanePlace place(int warp, int lane) { return place_of_scaled(warp, lane); }
  template <class Params>
  __device__ __forceinline__ void prepare(const Params&) {}
  __device__ __forceinline__ void load(const uint8_t* tile, LanePlace place) {
    CodeWords::load(tile, place.weights);
    scales = tile + kCodeBytes + place.scales;
  }
  // Of rows r and r + 8: 2 to the stored exponent, times `unit`.
  __device__ __forceinline__ float2 powers(int block, float unit) const {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(scales + block / 2 * 4) >> block % 2 * 8;
    return {__uint_as_float((pair & 0xFF) << 23) * unit, __uint_as_float((pair >> 16 & 0xFF) << 23) * unit};
  }
};

// E2M1 bits at 8..6 of a bfloat16 are the value times 2^-126, and the scale byte, stored as the exponent of 2^126 * scale, undoes
// that in the same multiplication.
//   half word   15 14 13 12 11 10 9 8 7 6 5 4 3 2 1 0      s sign, e two bits of exponent, m mantissa
//   a[i]        s0 s3 s2 s1 e3 e3 m3 e0 e0 m0 e1 e1 m1 e2 e2 m2
struct Mxfp4Weights : ScaledCodes {
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
    const uint32_t w = words[step], both_rows = rows_scale(scales[step / 4], step);
    const uint32_t even = both_low(both_rows), odd = both_high(both_rows);
    // Bits of a[2] and a[3] brought together: left shifts cost the least, they run beside the logic.
    const uint32_t last = (w & 0x40074007) | ((w >> 4) & ~0x40074007u);
    a[0] = bf16x2_mul(w & 0x81C081C0, even);
    a[1] = bf16x2_mul((w << 3) & 0x81C081C0, odd);
    a[2] = bf16x2_mul((last << 6) & 0x81C081C0, even);
    a[3] = bf16x2_mul((last << 1) & 0x81C081C0, odd);
  }
};

// The same tiles for int8 activations: codes become twice their value, an integer. A byte permutation looks up 4 magnitudes of 3
// bits in a table of 8 bytes.
struct Mxfp4IntegerWeights : ScaledIntegers {
  static constexpr float kOutScale = 0.5f;  // of the codes

  __device__ __forceinline__ float2 scale(int block) const { return powers(block, 0x1p-126f); }
  // magnitudes: 4 of 3 bits, one in each of the lower nibbles; signs: 0xFF where negative. -m = ~(m - 1), 0 stays 0.
  __device__ __forceinline__ static uint32_t looked_up(uint32_t magnitudes, uint32_t signs) {
    const uint32_t positive = __byte_perm(0x03020100, 0x0C080604, magnitudes);
    const uint32_t flip = __byte_perm(0xFEFCFE00, 0xF8F0FCF8, magnitudes);  // positive ^ negative
    return positive ^ (flip & signs);
  }
  // Of the bits at `first` and `second` of both half words: nibbles first even, second even, first odd, second odd.
  template <int kFirst, int kSecond>
  __device__ __forceinline__ static uint32_t magnitudes(uint32_t w) {
    const uint32_t second = kSecond <= 4 ? w << (4 - kSecond) % 32 : w >> (kSecond - 4) % 32;
    const uint32_t pairs = ((w >> kFirst) & 0x000F000F) | (second & 0xFFF0FFF0);
    return __byte_perm(pairs, 0, 0x4420) & 0x7777;
  }
  // The sign of the highest bit of bytes 1 and 3 of both words.
  __device__ __forceinline__ static uint32_t signs(uint32_t first, uint32_t second) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, 0xFBD9;" : "=r"(d) : "r"(first), "r"(second));
    return d;
  }
  // A step is 32 inputs: two words, each row r of a[0], a[2] and row r + 8 of a[1], a[3].
  __device__ __forceinline__ void fragment(uint32_t (&a)[4], int step) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t w = words[2 * step + i];
      a[2 * i] = looked_up(magnitudes<6, 0>(w), signs(w, w << 2));
      a[2 * i + 1] = looked_up(magnitudes<3, 9>(w), signs(w << 3, w << 1));
    }
  }
};

}  // namespace mlspec
