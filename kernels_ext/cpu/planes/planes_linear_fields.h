// How do planes become floats without a table? Codes where they lie in a 32-bit word are digits of a large float.
//
// Included inside the anonymous namespaces of bitplane_linear_{avx2,avx512vnni,avx512bf16}.cpp after
// planes_linear_nibbles.h. Bits has what that names, Float, shift_left(v, count) of 16-bit words, word_left<k> and
// word_right<k> of 32-bit words,
//   digits(v, mask, power) ((v & mask) | power, as floats) and subtract(a, b).

// 2^e with a code in its lower bits is 2^e + code * 2^(e - 23 + the code's lowest bit): e makes that the number of the
// code, and one subtraction, which is exact, takes 2^e away and adds what code 0 means.
template <class Bits>
struct Field {
  typename Bits::Int mask, power;
  typename Bits::Float minus;

  void set(const mlspec_linear_args& a, int lowest_bit) {
    const int planes = static_cast<int>(a.num_planes), unit = static_cast<int>(a.stored_planes) - planes;
    const uint32_t exponent = 127 + 23 + unit - lowest_bit, bits = exponent << 23;
    float large;
    std::memcpy(&large, &bits, 4);
    mask = Bits::word(((1u << planes) - 1) << lowest_bit);
    power = Bits::word(bits);
    minus = Bits::set(large - 0.5f * static_cast<float>(doubled_value(a, planes, 0)));
  }
  typename Bits::Float operator()(typename Bits::Int word) const {
    return Bits::subtract(Bits::digits(word, mask, power), minus);
  }
};

template <class Bits, int kParts>
struct UnpackFields;

// Up to four planes: nibbles, three of which lie in the 23 lower bits of a float and clear of its last 8.
template <class Bits>
struct UnpackFields<Bits, 1> {
  int64_t plane_bytes;
  int planes;
  Field<Bits> second, third, fourth;  // by the nibble of a word

  explicit UnpackFields(const mlspec_linear_args& a) : plane_bytes(a.plane_bytes), planes(static_cast<int>(a.num_planes)) {
    second.set(a, 8), third.set(a, 12), fourth.set(a, 16);
  }
  // use(k, column): element k of kLanes outputs.
  template <class Use>
  __attribute__((always_inline)) void columns(const uint8_t* block, Use use) const {
    typename Bits::Int codes[4];
    nibbles<Bits>(block, plane_bytes, planes, codes);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const auto below = Bits::template word_left<8>(codes[s]), above = Bits::template word_right<12>(codes[s]);
      use(element_of(s), second(below));
      use(element_of(4 + s), third(below));
      use(element_of(8 + s), second(codes[s]));
      use(element_of(12 + s), third(codes[s]));
      use(element_of(16 + s), fourth(codes[s]));
      use(element_of(20 + s), second(above));
      use(element_of(24 + s), third(above));
      use(element_of(28 + s), fourth(above));
    }
  }
};

// Five planes and more: bytes, whose upper bits are the code.
template <class Bits>
struct UnpackFields<Bits, 2> {
  int64_t plane_bytes;
  int lower_planes;
  Field<Bits> field;

  explicit UnpackFields(const mlspec_linear_args& a) : plane_bytes(a.plane_bytes), lower_planes(planes_of_part(a, 1)) {
    field.set(a, 16 - static_cast<int>(a.num_planes));
  }
  // use(bit, ...): the columns of bits `bit`, bit + 8, bit + 16 and bit + 24.
  template <class Use>
  __attribute__((always_inline)) void quads(const uint8_t* block, Use use) const {
    typename Bits::Int upper[4], lower[4];
    nibbles<Bits>(block, plane_bytes, kNibblePlanes, upper);
    nibbles<Bits>(block + kNibblePlanes * plane_bytes, plane_bytes, lower_planes, lower);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      lower[s] = Bits::shift_left(lower[s], kNibblePlanes - lower_planes);
      Bits::template exchange<4, 0xF0F0>(upper[s], lower[s]);
      bytes(s, lower[s], use);
      bytes(4 + s, upper[s], use);
    }
  }
  template <class Use>
  __attribute__((always_inline)) void bytes(int bit, typename Bits::Int codes, Use use) const {
    use(bit, field(Bits::template word_left<8>(codes)), field(codes), field(Bits::template word_right<8>(codes)),
        field(Bits::template word_right<16>(codes)));
  }
  template <class Use>
  __attribute__((always_inline)) void columns(const uint8_t* block, Use use) const {
    using Float = typename Bits::Float;
    quads(block, [&](int bit, Float first, Float second, Float third, Float fourth) __attribute__((always_inline)) {
      use(element_of(bit), first);
      use(element_of(bit + 8), second);
      use(element_of(bit + 16), third);
      use(element_of(bit + 24), fourth);
    });
  }
};

// The way of an Isa that multiplies floats by floats, a column of elements at a time.
template <class Isa, class Bits, class Widen>
struct ByColumns {
  template <int N>
  using Tokens = FloatTokens<N, Widen>;
  template <int kParts>
  using Unpack = UnpackFields<Bits, kParts>;

  template <int kParts, int N, class Float>
  static inline __attribute__((always_inline)) void add_block(const Unpack<kParts>& unpack, const uint8_t* block,
                                                              const Tokens<N>& tokens, Float (&dots)[N]) {
    unpack.columns(block, [&](int k, Float column) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) dots[t] = Isa::fma(column, Isa::set(tokens.x[t][k]), dots[t]);
    });
  }
};
