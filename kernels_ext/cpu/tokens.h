// How does a block of 32 elements of N tokens lie while it is multiplied? As in memory, or as floats.
//
// Included inside the anonymous namespaces of {w4a16,planes}_linear_*.cpp.

template <int N>
struct RowTokens {
  const uint16_t* x;
  int64_t stride;
  void load(const uint16_t* block, int64_t row_stride) { x = block, stride = row_stride; }
};

// Widen has kLanes and widen(from, to), which makes as many bfloat16 floats.
template <int N, class Widen>
struct FloatTokens {
  alignas(4 * Widen::kLanes) float x[N][32];
  void load(const uint16_t* block, int64_t row_stride) {
    for (int t = 0; t < N; ++t) {
      for (int k = 0; k < 32; k += Widen::kLanes) Widen::widen(block + t * row_stride + k, &x[t][k]);
    }
  }
};
