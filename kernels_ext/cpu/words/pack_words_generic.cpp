// Words of other libraries' 4-bit codes, moved without intrinsics: any processor.
#include <cstdint>
#include <cstring>
#include <utility>

#include "../kernels.h"

namespace {

constexpr int kLanes = 8;

struct Vec {
  uint32_t lane[kLanes];
  static Vec zero() { return {}; }
  static Vec load(const uint32_t* p, int64_t lanes) {
    Vec v{};
    std::memcpy(v.lane, p, sizeof(uint32_t) * static_cast<size_t>(lanes));
    return v;
  }
  void store(uint32_t* p, int64_t lanes) const { std::memcpy(p, lane, sizeof(uint32_t) * static_cast<size_t>(lanes)); }
  Vec shifted(int left, int right) const {
    Vec v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = lane[i] << left >> right;
    return v;
  }
  // The bits of `mask` are those of `other`; here they are 0.
  Vec with(const Vec& other, uint32_t mask) const {
    Vec v;
    for (int i = 0; i < kLanes; ++i) v.lane[i] = lane[i] | (other.lane[i] & mask);
    return v;
  }
  static void transpose(Vec (&rows)[kLanes]) {
    for (int r = 1; r < kLanes; ++r)
      for (int i = 0; i < r; ++i) std::swap(rows[r].lane[i], rows[i].lane[r]);
  }
};

inline Vec operator^(Vec a, const Vec& b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] ^= b.lane[i];
  return a;
}

inline Vec operator&(Vec a, uint32_t mask) {
  for (uint32_t& lane : a.lane) lane &= mask;
  return a;
}

#include "pack_words_blocks.h"

}  // namespace

MLSPEC_PACK_WORDS(generic)
