// How does a weight of bit-planes meet integers? As a format of ../int8/int8_linear_tile.h, which includes this at its end.
//
// A plane's bits i, i + 8, i + 16 and i + 24 of an output are elements 2 i, 2 i + 16, 2 i + 1 and 2 i + 17 of a block of 32. Four
// planes, as nibbles (planes_linear_nibbles.h), are so the low bits of the four bytes of operand i, and planes above these the high
// ones: of other planes they are nibbles, too. x is put in the order of the operands as it comes: its two halves byte by byte.

#include "planes_linear_codes.h"
#include "planes_linear_nibbles.h"

struct PlaneOperands {
  int planes, above;  // all, and those beyond four
  int64_t plane_bytes;
  Isa::Int low, high;  // bits of a byte that are a code's

  explicit PlaneOperands(const mlspec_linear_args& a)
      : planes(static_cast<int>(a.num_planes)),
        above(std::max<int>(0, planes - kNibblePlanes)),
        plane_bytes(a.plane_bytes),
        low(Isa::broadcast(0x01010101 * ((1 << (a.num_planes - above)) - 1))),
        high(Isa::broadcast(0x01010101 * (((1 << above) - 1) << kNibblePlanes))) {}
};

// kMany: any of the numbers of planes that there are; else five.
template <bool kMany>
struct Planes {
  static constexpr int kLargestCode = kMany ? 127 : 31;
  static constexpr int64_t kBlockBytes = kPlaneBytes, kAhead = 768;
  static int64_t bytes_read(const mlspec_linear_args& a) { return a.in_features / kBlock * kPlaneBytes * a.num_planes; }
  static int64_t blocks_per_group(const mlspec_linear_args& a) { return a.acts->group / kBlock; }
  static int offset(const mlspec_linear_args& a) { return 1 << (a.num_planes - 1); }
  static Isa::Int minus_zero(const mlspec_linear_args& a, int64_t) { return Isa::broadcast(-offset(a) & 0xFFFF); }
  static Isa::Float scale(const mlspec_linear_args& a, int64_t at) {
    return Isa::load_float16(static_cast<const uint16_t*>(a.scale) + at);
  }
  static int64_t scale_row(const mlspec_linear_args& a, int64_t tile, int64_t g, int64_t) {
    const int shift = __builtin_ctzll(static_cast<uint64_t>(a.group));  // a power of two
    return tile * (a.in_features >> shift) + (g * a.acts->group >> shift);
  }
  static PlaneOperands unpack(const mlspec_linear_args& a) { return PlaneOperands(a); }
  static __attribute__((always_inline)) inline void prefetch(const mlspec_linear_args& a, const uint8_t* block) {
    prefetch_planes(a, block);
  }
  template <int N>
  static inline __attribute__((always_inline)) const int8_t* in_order(const int8_t* x, int8_t* room) {
    for (int t = 0; t < N; ++t) {
      const __m128i even = _mm_loadu_si128((const __m128i*)(x + kBlock * t));
      const __m128i odd = _mm_loadu_si128((const __m128i*)(x + kBlock * t + 16));
      _mm_store_si128((__m128i*)(room + kBlock * t), _mm_unpacklo_epi8(even, odd));
      _mm_store_si128((__m128i*)(room + kBlock * t + 16), _mm_unpackhi_epi8(even, odd));
    }
    return room;
  }
  template <int N>
  static inline __attribute__((always_inline)) void add_block(const PlaneOperands& unpack, const uint8_t* block, const int8_t* x,
                                                              Isa::Int (&dots)[N]) {
    Isa::Int codes[4], above[4], operands[8];
    if (!kMany) {
      nibbles<Isa::Bits>(block, unpack.plane_bytes, 1, above);
      nibbles<Isa::Bits>(block + unpack.plane_bytes, unpack.plane_bytes, kNibblePlanes, codes);
    } else if (unpack.above) {
      nibbles<Isa::Bits>(block, unpack.plane_bytes, unpack.above, above);
      nibbles<Isa::Bits>(block + unpack.above * unpack.plane_bytes, unpack.plane_bytes, kNibblePlanes, codes);
    } else {
      nibbles<Isa::Bits>(block, unpack.plane_bytes, unpack.planes, codes);
      for (Isa::Int& none : above) none = unpack.high;  // zeros
    }
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const Isa::Int raised = Isa::Bits::template shift_left<4>(above[s]);
      operands[s] = (codes[s] & unpack.low) | (raised & unpack.high);
      operands[4 + s] = (Isa::Bits::template shift_right<4>(codes[s]) & unpack.low) | (above[s] & unpack.high);
    }
    Isa::add_operands<Planes, N>(operands, x, dots);
  }
};

inline void bitplane_linear_int8(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  a.num_planes == kNibblePlanes + 1 ? linear<Planes<false>>(a, out_begin, out_end) : linear<Planes<true>>(a, out_begin, out_end);
}
