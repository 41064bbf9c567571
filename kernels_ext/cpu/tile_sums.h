// How do the sums of a tile leave the registers?
//
// Included inside the anonymous namespaces of {w4a16,planes}_linear_*.cpp after `Isa` and tile_rows.h.

constexpr int kLanes = 16 / Isa::kVectors;

template <int N>
inline void store_tile(const mlspec_linear_args& a, int64_t tile, int64_t token, const Isa::Float (&acc)[Isa::kVectors][N]) {
  alignas(64) float sums[N][kTileOutputs];
#pragma GCC unroll 16
  for (int t = 0; t < N; ++t) {
    for (int v = 0; v < Isa::kVectors; ++v) Isa::store(sums[t] + v * kLanes, acc[v][t]);
  }
  add_rows(a, tile, token, N, sums);
}
