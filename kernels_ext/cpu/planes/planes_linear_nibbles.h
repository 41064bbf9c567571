// How do one to four planes become nibbles, in two steps that exchange bits between registers?
//
// Included inside the anonymous namespaces of planes_linear_<isa>.cpp. Bits has Int, load_plane(p) and on 16-bit words
//   shift_left<k>, shift_right<k>, choose<mask>(a, b) (bits of a where mask has ones, else of b) and
//   exchange<k, mask>(a, b): a = choose(a, b >> k), b = choose(a << k, b).

// Nibble i of register s is the code of bit 4 i + s of the planes; the first plane is its highest bit, and above `planes`
// bits it is anything.
template <class Bits>
__attribute__((always_inline)) inline void nibbles(const uint8_t* block, int64_t plane_bytes, int planes,
                                                   typename Bits::Int (&codes)[4]) {
  using Int = typename Bits::Int;
  constexpr int kOdd = 0xAAAA, kUpper = 0xCCCC;
  const Int first = Bits::load_plane(block);
  if (planes == 1) {
    codes[0] = first;
    codes[1] = Bits::template shift_right<1>(first);
    codes[2] = Bits::template shift_right<2>(first);
    codes[3] = Bits::template shift_right<3>(first);
    return;
  }
  Int second = Bits::load_plane(block + plane_bytes);
  if (planes == 2) {
    Int odd = first;
    Bits::template exchange<1, kOdd>(odd, second);
    codes[0] = second;
    codes[1] = odd;
    codes[2] = Bits::template shift_right<2>(second);
    codes[3] = Bits::template shift_right<2>(odd);
    return;
  }
  Int third = Bits::load_plane(block + 2 * plane_bytes);
  if (planes == 3) {
    Bits::template exchange<1, kOdd>(second, third);
    codes[0] = Bits::template choose<kUpper>(Bits::template shift_left<2>(first), third);
    codes[1] = Bits::template choose<kUpper>(Bits::template shift_left<1>(first), second);
    codes[2] = Bits::template choose<kUpper>(first, Bits::template shift_right<2>(third));
    codes[3] = Bits::template choose<kUpper>(Bits::template shift_right<1>(first), Bits::template shift_right<2>(second));
    return;
  }
  Int odd = first, fourth = Bits::load_plane(block + 3 * plane_bytes);
  Bits::template exchange<1, kOdd>(odd, second);
  Bits::template exchange<1, kOdd>(third, fourth);
  Bits::template exchange<2, kUpper>(odd, third);
  Bits::template exchange<2, kUpper>(second, fourth);
  codes[0] = fourth;
  codes[1] = third;
  codes[2] = second;
  codes[3] = odd;
}
