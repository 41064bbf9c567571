// Where do the steps of a nested weight lie, what is fetched ahead of their use, and how is a result added to y?
//
// Included inside the anonymous namespaces of nested_linear_*.cpp.

using mlspec::kBlock;
using namespace mlspec::cpu_tiles;

constexpr int64_t kPairs = kBlock / 2;

using Pairs = uint32_t[kPairs][kTileOutputs];  // a rebuilt step: bfloat16 [16 pairs][16 outputs][2]

// The three streams of one tile, step after step; behind its last step lies the next tile's first.
struct TileSteps {
  const uint8_t *nibbles = nullptr, *exponents = nullptr, *low = nullptr;
  TileSteps() = default;
  TileSteps(const mlspec_linear_args& a, int64_t tile) {
    const int64_t steps = a.in_features / kBlock * tile;
    nibbles = static_cast<const uint8_t*>(a.weight) + steps * kTileBytes;
    exponents = static_cast<const uint8_t*>(a.scale) + steps * kTileOutputs;
    low = a.low + steps * kLowTileBytes;
  }
  TileSteps from(int64_t step) const {
    TileSteps later = *this;
    later.nibbles += step * kTileBytes, later.exponents += step * kTileOutputs, later.low += step * kLowTileBytes;
    return later;
  }
  // A step is fetched in kTurns turns. Always inline: GCC drops the call of a function that does nothing but prefetch.
  template <int kTurns>
  __attribute__((always_inline)) inline void prefetch(int64_t step, int turn) const {
    constexpr int kNibbleLines = kTileBytes / 64, kLowLines = kLowTileBytes / 64;
    for (int line = turn * kNibbleLines / kTurns; line < (turn + 1) * kNibbleLines / kTurns; ++line)
      __builtin_prefetch(nibbles + step * kTileBytes + 64 * line, 0, 3);
    for (int line = turn * kLowLines / kTurns; line < (turn + 1) * kLowLines / kTurns; ++line)
      __builtin_prefetch(low + step * kLowTileBytes + 64 * line, 0, 3);
    if (turn == 0) __builtin_prefetch(exponents + step * kTileOutputs, 0, 3);
  }
  template <class Rebuild>
  __attribute__((always_inline)) inline void rebuild(const Rebuild& rebuild, int64_t step, Pairs& to) const {
    rebuild(nibbles + step * kTileBytes, exponents + step * kTileOutputs, low + step * kLowTileBytes, to);
  }
};

inline void add_row(const mlspec_linear_args& a, int64_t tile, int64_t token, const float* total) {
  const int64_t first = tile * kTileOutputs, outputs = std::min(a.out_features - first, kTileOutputs);
  float* const __restrict y = a.y + token * a.y_stride + first;
  if (outputs == kTileOutputs && !a.bias) {  // of known length, without a bias: two vectors
    for (int64_t r = 0; r < kTileOutputs; ++r) y[r] = a.accumulate ? y[r] + total[r] : total[r];
    return;
  }
  for (int64_t r = 0; r < outputs; ++r) {
    const float value = a.bias ? total[r] + a.bias[first + r] : total[r];
    y[r] = a.accumulate ? y[r] + value : value;
  }
}
