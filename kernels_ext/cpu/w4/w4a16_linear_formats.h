// Which numbers and scales do the 4-bit weights of w4a16_linear_*.cpp mean?
//
// Included inside their anonymous namespaces, after `Isa`. Of it this needs Float and
//   zeros(), fma(a, b, c), set(scalar), power(p) (bytes << 23 as floats), load_float16(p), and kValueFactor: its E2M1 values are
//   this many times too large (2 where they are integers).

#include "../tile_rows.h"

using mlspec::kBlock, mlspec::cpu_tiles::kTileBytes;

// value(a, i), i in 0..31: the number that nibble i % 16 means; where there are zero points, that the difference i modulo 32
// means.
struct Mxfp4 {
  static constexpr bool kHasZeros = false;
  static constexpr float value(const mlspec_linear_args&, int i) {
    constexpr auto magnitude = mlspec::kMagnitudes;
    return ((i & 8) ? -magnitude.of[i & 7] : magnitude.of[i & 7]) * Isa::kValueFactor;
  }
  static int64_t blocks_per_group(const mlspec_linear_args&) { return 1; }
  // 2^(byte - 127), byte 0 is 0; the fma keeps that (or halves it) and makes byte 255, Inf as floats go, NaN.
  static Isa::Float scale(const mlspec_linear_args& a, int64_t at) {
    const Isa::Float power = Isa::power(static_cast<const uint8_t*>(a.scale) + at);
    return Isa::fma(power, Isa::set(1.0f / Isa::kValueFactor - 1.0f), power);
  }
};

// The draft of a nested weight: MXFP4 with a codebook that the weight brings along, in units of 2^(byte - 132).
struct Nested {
  static constexpr bool kHasZeros = false;
  static float value(const mlspec_linear_args& a, int i) {
    const float magnitude = a.codebook[i & 7];
    return (i & 8) ? -magnitude : magnitude;
  }
  static int64_t blocks_per_group(const mlspec_linear_args&) { return 1; }
  static Isa::Float scale(const mlspec_linear_args& a, int64_t at) {  // exact: byte >= 31 wherever there is an output
    const Isa::Float power = Isa::power(static_cast<const uint8_t*>(a.scale) + at);
    return Isa::fma(power, Isa::set(0x1p-5f), Isa::zeros());
  }
};

template <bool HasZeros>
struct Int4 {
  static constexpr bool kHasZeros = HasZeros;
  static constexpr float value(const mlspec_linear_args&, int i) {
    return static_cast<float>(HasZeros ? (i < 16 ? i : i - 32) : (i & 15) - 8);
  }
  static int64_t blocks_per_group(const mlspec_linear_args& a) { return a.group / kBlock; }
  static Isa::Float scale(const mlspec_linear_args& a, int64_t at) {
    return Isa::load_float16(static_cast<const uint16_t*>(a.scale) + at);
  }
};

// The three kernels of an instruction set, whose linear<Format> and int4_linear are defined where this stands.
#define MLSPEC_W4A16_LINEARS(isa)                            \
  MLSPEC_LINEAR(mxfp4_linear_bf16_##isa, linear<Mxfp4>)  \
  MLSPEC_LINEAR(nested_linear_bf16_##isa, linear<Nested>) \
  MLSPEC_LINEAR(int4_linear_bf16_##isa, int4_linear)
