// Exact product with a nested weight without intrinsics: any processor, and the plainest statement of what is rebuilt.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"
#include "../target.h"

namespace {

#include "nested_field.h"

inline float widen(uint32_t bfloat16) {
  const uint32_t bits = bfloat16 << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Isa {
  struct Sum {  // two of bf16_linear's: those of the pair's even and of its odd element
    float even[16], odd[16];
  };
  struct Weights {
    float even[16], odd[16];
  };
  struct Activations {
    float element[32];
  };
  static constexpr int kVectors = 1, kSums = 4, kMaxTokens = 4;
  static constexpr int sums_for(int) { return 1; }

  static void arrange(const uint16_t* x, Activations& to) {
    for (int i = 0; i < 32; ++i) to.element[i] = widen(x[i]);
  }

  static void rebuild(const uint8_t* nibbles, const uint8_t* exponents, const uint8_t* low, uint32_t (*pairs)[16]) {
    for (int pair = 0; pair < 16; ++pair) {
      for (int r = 0; r < 16; ++r) {
        const uint32_t even = nested_weight(nibbles, exponents, low, 2 * pair, r);
        pairs[pair][r] = even | nested_weight(nibbles, exponents, low, 2 * pair + 1, r) << 16;
      }
    }
  }

  static Sum load(const float* p) {
    Sum sum;
    std::memcpy(&sum, p, sizeof sum);
    return sum;
  }
  static void store(float* p, const Sum& sum) { std::memcpy(p, &sum, sizeof sum); }
  static Weights load_pairs(const uint32_t* p) {
    Weights w;
    for (int r = 0; r < 16; ++r) w.even[r] = widen(p[r] & 0xFFFF), w.odd[r] = widen(p[r] >> 16);
    return w;
  }
  static Sum fma(const Weights& w, const Activations& x, int pair, Sum sum) {
    for (int r = 0; r < 16; ++r) sum.even[r] += w.even[r] * x.element[2 * pair];
    for (int r = 0; r < 16; ++r) sum.odd[r] += w.odd[r] * x.element[2 * pair + 1];
    return sum;
  }
  static void store_total(const Sum* s, float* to) {
    for (int r = 0; r < 16; ++r) {
      const float first = (s[0].even[r] + s[0].odd[r]) + (s[1].even[r] + s[1].odd[r]);
      const float last = (s[2].even[r] + s[2].odd[r]) + (s[3].even[r] + s[3].odd[r]);
      to[r] = first + last;
    }
  }
};

#include "nested_linear_tile.h"

}  // namespace

MLSPEC_LINEAR(nested_linear_exact_generic, linear)
