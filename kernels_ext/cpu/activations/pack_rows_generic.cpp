// Packing of activations without intrinsics: any processor, and the plainest statement of the rules.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../kernels.h"

namespace {

inline uint32_t float_bits(float value);
inline int32_t round_to_int(float value);
inline uint16_t to_bfloat16(float value);

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr bool kTransposes = false;
  struct Int {
    int32_t lane[kLanes];
  };
  static void round_bfloat16(const float* x, uint16_t* out) {
    for (int i = 0; i < 2 * kLanes; ++i) out[i] = to_bfloat16(x[i]);
  }
  static Int magnitude(const float* x) {
    Int v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = static_cast<int32_t>(float_bits(x[i]) & 0x7FFFFFFFu);
    return v;
  }
  static Int scaled(const float* x, float inverse) {
    Int v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = inverse != 0.0f ? round_to_int(x[i] * inverse) : 0;
    return v;
  }
  static Int max(Int a, const Int& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] = std::max(a.lane[i], b.lane[i]);
    return a;
  }
  static Int add(Int a, const Int& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static Int within(Int a, int32_t bound) {
    for (int32_t& lane : a.lane) lane = std::clamp(lane, -bound, bound);
    return a;
  }
  static void store(const Int& a, int32_t* out) { std::memcpy(out, a.lane, sizeof a.lane); }
  static void store_codes(const Int& a, int8_t* out) {
    for (int i = 0; i < kLanes; ++i) out[i] = static_cast<int8_t>(a.lane[i]);
  }
  static Int reduce_max(const Int* a) {
    Int v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = *std::max_element(a[i].lane, a[i].lane + kLanes);
    return v;
  }
  static Int reduce_add(const Int* a) {
    Int v = {};
    for (int i = 0; i < kLanes; ++i)
      for (int32_t lane : a[i].lane) v.lane[i] += lane;
    return v;
  }
};

#include "pack_rows_order.h"

}  // namespace

MLSPEC_PACK_ROWS(generic)
