// How do the sums of a tile of 16 outputs get into y?
//
// Included inside the anonymous namespaces of w4a16_linear_*.cpp and bitplane_linear_*.cpp.

using mlspec::cpu_tiles::kTileOutputs;

// sums [count][16] of one tile to the rows of y from `token` on. Out of line: inlined for every width it was most of the code.
__attribute__((noinline)) void add_rows(const mlspec_linear_args& a, int64_t tile, int64_t token, int count,
                                        const float (*sums)[kTileOutputs]) {
  const int64_t first = tile * kTileOutputs, outputs = std::min(a.out_features - first, kTileOutputs);
  const float* const bias = a.bias ? a.bias + first : nullptr;
  for (int t = 0; t < count; ++t) {
    float* const __restrict y = a.y + (token + t) * a.y_stride + first;
    for (int64_t r = 0; r < outputs; ++r) {
      const float value = bias ? sums[t][r] + bias[r] : sums[t][r];
      y[r] = a.accumulate ? y[r] + value : value;
    }
  }
}
