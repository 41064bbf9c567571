// Bit-planes times bfloat16 activations without intrinsics: any processor, and the plainest statement of the sums.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

namespace {

#include "../tile_rows.h"
#include "../lanes_generic.h"
#include "../tokens.h"
#include "planes_linear_codes.h"

struct Isa : Lanes {
  static constexpr int tiles_for(int, int) { return 1; }

  template <int N>
  using Tokens = RowTokens<N>;

  template <int kParts>
  struct Unpack {
    int planes;
    int64_t plane_bytes;
    float values[1 << kMaxPlanes];
    explicit Unpack(const mlspec_linear_args& a) : planes(static_cast<int>(a.num_planes)), plane_bytes(a.plane_bytes) {
      for (int code = 0; code < 1 << planes; ++code) values[code] = 0.5f * static_cast<float>(doubled_value(a, planes, code));
    }
    Float look_up(const uint32_t (*words)[16], int bit) const {
      Float v;
      for (int r = 0; r < 16; ++r) {
        uint32_t code = 0;
        for (int plane = 0; plane < planes; ++plane) code = code << 1 | (words[plane][r] >> bit & 1);
        v.lane[r] = values[code];
      }
      return v;
    }
  };

  template <int kParts, int N>
  static void add_block(const Unpack<kParts>& unpack, const uint8_t* block, const Tokens<N>& tokens, Float (&dots)[N]) {
    uint32_t words[kMaxPlanes][16];
    for (int plane = 0; plane < unpack.planes; ++plane) {
      const uint8_t* const bytes = block + plane * unpack.plane_bytes;
      for (int r = 0; r < 16; ++r) {
        const uint8_t* const b = bytes + 4 * r;
        words[plane][r] = b[0] | b[1] << 8 | b[2] << 16 | static_cast<uint32_t>(b[3]) << 24;
      }
    }
    for (int bit = 0; bit < 32; ++bit) {
      const Float column = unpack.look_up(words, bit);
      for (int t = 0; t < N; ++t) {
        Float x;
        std::fill_n(x.lane, 16, bits_float(static_cast<uint32_t>(tokens.x[t * tokens.stride + element_of(bit)]) << 16));
        dots[t] = fma(column, x, dots[t]);
      }
    }
  }
};

#include "planes_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(bitplane_linear_generic, linear<1>)
