// 4-bit weights times bfloat16 activations without intrinsics: any processor, and the plainest statement of the sums.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

namespace {

#include "../lanes_generic.h"
#include "../tokens.h"

struct Isa : Lanes {
  struct Zeros {
    uint8_t lane[16];
  };
  static constexpr float kValueFactor = 1.0f;
  static constexpr int tiles_for(int) { return 1; }

  static Float set(float scalar) {
    Float v;
    for (float& lane : v.lane) lane = scalar;
    return v;
  }
  static Float power(const uint8_t* p) {
    Float v;
    for (int i = 0; i < 16; ++i) v.lane[i] = bits_float(static_cast<uint32_t>(p[i]) << 23);
    return v;
  }
  static Zeros load_zeros(const uint8_t* p) {
    Zeros zeros;
    std::memcpy(zeros.lane, p, sizeof zeros.lane);
    return zeros;
  }
  static void prefetch(const uint8_t*) {}

  template <int N>
  using Tokens = RowTokens<N>;

  template <class Format>
  struct Unpack {
    float values[32];
    explicit Unpack(const mlspec_linear_args& a) {
      for (int i = 0; i < 32; ++i) values[i] = Format::value(a, i);
    }
    Float look_up(const uint8_t* bytes, int shift, const Zeros& zeros) const {  // nibbles of each output's first byte
      Float v;
      for (int r = 0; r < 16; ++r) {
        const int code = (bytes[4 * r] >> shift) & 15;
        v.lane[r] = values[Format::kHasZeros ? (code - zeros.lane[r]) & 31 : code];
      }
      return v;
    }
  };

  template <class Format, int N>
  static void add_block(const Unpack<Format>& unpack, const uint8_t* weight, const Zeros& zeros, const Tokens<N>& tokens,
                        Float (&dots)[N]) {
    for (int k = 0; k < 32; ++k) {  // bytes of row k / 8, nibble k / 4 % 2
      const Float column = unpack.look_up(weight + k / 8 * 64 + k % 4, k & 4, zeros);
      for (int t = 0; t < N; ++t) {
        const float x = bits_float(static_cast<uint32_t>(tokens.x[t * tokens.stride + k]) << 16);
        dots[t] = fma(column, set(x), dots[t]);
      }
    }
  }
};

#include "w4a16_linear_tile.h"

}  // namespace

MLSPEC_W4A16_LINEARS(generic)
