// How is a tile of dense weight rows times activation rows summed? One algorithm for every instruction set.
//
// Included by each dense_linear_<isa>.cpp inside its anonymous namespace, after `MLSPEC_TARGET`. A `Dot` has:
//   Element                     of weights and activations: uint16_t (bfloat16) or float
//   kStep                       elements of a row that one step multiplies
//   kMaxCols, rows_for(cols)    activation rows of the widest tile; weight rows of a tile of so many
//   load(p), load(p, count)     kStep elements; the first count of them, zeros for the others, nothing read beyond
//   fma(w, x, sum), zero()      sum + products, lane by lane
//   add_lanes(const Sum[4], float[4])    the sum of the lanes of each of four, always by the same tree
// Weights may start anywhere. A sum runs over k in steps from the first to the last and then over lanes, whatever the tile
// is: so a row of y has the same bits in every call.

// f(0), f(1), ... f(N - 1) with constant arguments, so that arrays indexed by them live in registers.
template <int N, typename F>
__attribute__((always_inline)) inline void unroll(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

template <int Rows, int Cols>
inline void store_tile(const mlspec_linear_args& a, int64_t feature, int64_t x_row, const float* sum) {
  for (int c = 0; c < Cols; ++c) {
    float* y = a.y + (x_row + c) * a.y_stride + feature;
    for (int r = 0; r < Rows; ++r) {
      float value = sum[c * Rows + r];
      if (a.bias) value += a.bias[feature + r];
      y[r] = a.accumulate ? y[r] + value : value;
    }
  }
}

template <class Dot>
struct WholeStep {
  typename Dot::Operand operator()(const typename Dot::Element* p) const { return Dot::load(p); }
};

template <class Dot>
struct LastStep {
  int64_t count;
  typename Dot::Operand operator()(const typename Dot::Element* p) const { return Dot::load(p, count); }
};

// The starts of the next tile's rows: the processor's own prefetchers follow a row only when it is under way.
// Always inline: GCC drops the call of a function that does nothing but prefetch.
template <int Rows, class Element>
__attribute__((always_inline)) inline void prefetch_rows(const Element* next, int64_t in) {
  constexpr int kLine = 64 / sizeof(Element);
  for (int r = 0; r < Rows; ++r) {
    __builtin_prefetch(next + r * in, 0, 2);
    __builtin_prefetch(next + r * in + kLine, 0, 2);
  }
}

template <class Dot, int Rows, int Cols>
__attribute__((noinline)) void tile(const mlspec_linear_args& a, int64_t feature, int64_t x_row) {
  using Element = typename Dot::Element;
  constexpr int kSums = (Rows * Cols + 3) / 4 * 4;
  const int64_t in = a.in_features, whole = in - in % Dot::kStep;
  const Element* w = static_cast<const Element*>(a.weight) + feature * in;
  const Element* x = static_cast<const Element*>(a.acts->data) + x_row * in;
  prefetch_rows<Rows>(w + Rows * in, in);
  typename Dot::Sum sum[kSums];  // [Cols][Rows], then what fills the last four
  unroll<kSums>([&](auto i) __attribute__((always_inline)) { sum[i] = Dot::zero(); });
  const auto step = [&](const auto& load) __attribute__((always_inline)) {
    typename Dot::Operand row[Rows];
    unroll<Rows>([&](auto r) __attribute__((always_inline)) { row[r] = load(w + r * in); });
    unroll<Cols>([&](auto c) __attribute__((always_inline)) {
      const typename Dot::Operand col = load(x + c * in);
      unroll<Rows>([&](auto r) __attribute__((always_inline)) {
        sum[c * Rows + r] = Dot::fma(row[r], col, sum[c * Rows + r]);
      });
    });
  };
  for (int64_t k = 0; k < whole; k += Dot::kStep, w += Dot::kStep, x += Dot::kStep)
    step(WholeStep<Dot>{});
  if (whole < in) step(LastStep<Dot>{in - whole});
  float total[kSums];
  unroll<kSums / 4>([&](auto i) __attribute__((always_inline)) { Dot::add_lanes(sum + 4 * i, total + 4 * i); });
  store_tile<Rows, Cols>(a, feature, x_row, total);
}

template <class Dot, int Cols>
void tile_rows(const mlspec_linear_args& a, int64_t feature, int64_t end, int64_t x_row) {
  constexpr int kRows = Dot::rows_for(Cols);
  for (; feature + kRows <= end; feature += kRows) tile<Dot, kRows, Cols>(a, feature, x_row);
  for (; feature < end; ++feature) tile<Dot, 1, Cols>(a, feature, x_row);
}

template <class Dot, int Cols>
void tile_cols(const mlspec_linear_args& a, int64_t feature, int64_t end, int64_t x_row, int64_t cols) {
  if constexpr (Cols > 0) {
    if (cols == Cols) return tile_rows<Dot, Cols>(a, feature, end, x_row);
    tile_cols<Dot, Cols - 1>(a, feature, end, x_row, cols);
  }
}

// Outputs in panels that stay in L2 while every tile of activation rows passes.
template <class Dot>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  constexpr int64_t kPanelBytes = 256 << 10;
  const int64_t n = a.acts->num_rows, tiles = (n + Dot::kMaxCols - 1) / Dot::kMaxCols;
  const int64_t row_bytes = a.in_features * static_cast<int64_t>(sizeof(typename Dot::Element));
  const int64_t panel = tiles > 1 ? std::max<int64_t>(kPanelBytes / row_bytes / 16, 1) * 16 : out_end - out_begin;
  for (int64_t feature = out_begin; feature < out_end; feature += panel) {
    const int64_t end = std::min(feature + panel, out_end);
    for (int64_t t = 0; t < tiles; ++t) {  // tiles of nearly equal width
      const int64_t begin = n * t / tiles, stop = n * (t + 1) / tiles;
      tile_cols<Dot, Dot::kMaxCols>(a, feature, end, begin, stop - begin);
    }
  }
}
