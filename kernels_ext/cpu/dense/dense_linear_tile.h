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
// is: so a row of y has the same bits in every call. Where rows are long and many, k is cut into parts: the sums of a panel
// wait, lane by lane, while the part of every weight row passes that of the activations in L1.

// f(0), f(1), ... f(N - 1) with constant arguments, so that arrays indexed by them live in registers.
template <int N, typename F>
__attribute__((always_inline)) inline void unroll(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

template <int Rows, int Cols>
__attribute__((always_inline)) inline void store_tile(const mlspec_linear_args& a, int64_t feature, int64_t x_row,
                                                      const float* sum) {
  float* const first = a.y + x_row * a.y_stride + feature;
  const int64_t stride = a.y_stride;
  if (!a.bias && !a.accumulate) {
    return unroll<Cols>([&](auto c) __attribute__((always_inline)) {
      std::memcpy(first + c * stride, sum + c * Rows, Rows * sizeof(float));
    });
  }
  for (int c = 0; c < Cols; ++c) {
    float* y = first + c * stride;
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

// Into L2 what the tile after the next multiplies at k, a line of every row. The processor's own prefetchers follow a row only
// when it is under way, and rows of a small model end before that. L1 is left to the activations.
// Always inline: GCC drops the call of a function that does nothing but prefetch.
template <int Rows, int Step, class Element>
__attribute__((always_inline)) inline void prefetch_rows(const Element* w, int64_t in, int64_t k) {
  constexpr int kLine = 64 / sizeof(Element);
  if (Step % kLine != 0 && k % kLine != 0) return;
  unroll<Rows>([&](auto r) __attribute__((always_inline)) { __builtin_prefetch(w + (2 * Rows + r) * in, 0, 2); });
}

// Elements [begin, end) of every row, begin a multiple of kStep. waiting: sums of the parts before, [kMaxCols] a weight row of
// the panel, from the row `feature` on.
template <class Dot>
struct Part {
  int64_t begin, end;
  typename Dot::Sum* waiting;
  int64_t feature;
};

template <class Dot, int Rows, int Cols>
__attribute__((noinline)) void tile(const mlspec_linear_args& a, int64_t feature, int64_t x_row, const Part<Dot>& part) {
  using Element = typename Dot::Element;
  constexpr int kSums = (Rows * Cols + 3) / 4 * 4;
  const int64_t in = a.in_features, whole = part.end - (part.end - part.begin) % Dot::kStep;
  const Element* w = static_cast<const Element*>(a.weight) + feature * in + part.begin;
  const Element* x = static_cast<const Element*>(a.acts->data) + x_row * in + part.begin;
  typename Dot::Sum sum[kSums];  // [Cols][Rows], then what fills the last four
  typename Dot::Sum* const waiting = part.waiting + (feature - part.feature) * Dot::kMaxCols;
  unroll<kSums>([&](auto i) __attribute__((always_inline)) { sum[i] = Dot::zero(); });
  if (part.begin > 0) unroll<Rows * Cols>([&](auto i) __attribute__((always_inline)) { sum[i] = waiting[i]; });
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
  for (int64_t k = part.begin; k < whole; k += Dot::kStep, w += Dot::kStep, x += Dot::kStep) {
    prefetch_rows<Rows, Dot::kStep>(w, in, k);
    step(WholeStep<Dot>{});
  }
  if (whole < part.end) step(LastStep<Dot>{part.end - whole});
  if (part.end < in) return unroll<Rows * Cols>([&](auto i) __attribute__((always_inline)) { waiting[i] = sum[i]; });
  float total[kSums];
  unroll<kSums / 4>([&](auto i) __attribute__((always_inline)) { Dot::add_lanes(sum + 4 * i, total + 4 * i); });
  store_tile<Rows, Cols>(a, feature, x_row, total);
}

template <class Dot, int Cols>
void tile_rows(const mlspec_linear_args& a, int64_t feature, int64_t end, int64_t x_row, const Part<Dot>& part) {
  constexpr int kRows = Dot::rows_for(Cols);
  for (; feature + kRows <= end; feature += kRows) tile<Dot, kRows, Cols>(a, feature, x_row, part);
  for (; feature < end; ++feature) tile<Dot, 1, Cols>(a, feature, x_row, part);
}

template <class Dot, int Cols>
void tile_cols(const mlspec_linear_args& a, int64_t end, int64_t x_row, int64_t cols, const Part<Dot>& part) {
  if constexpr (Cols > 0) {
    if (cols == Cols) return tile_rows<Dot, Cols>(a, part.feature, end, x_row, part);
    tile_cols<Dot, Cols - 1>(a, end, x_row, cols, part);
  }
}

// Outputs in panels that stay in L2 while every tile of activation rows passes.
template <class Dot>
void linear(const mlspec_linear_args& a, int64_t out_begin, int64_t out_end) {
  constexpr int64_t kPanelBytes = 256 << 10, kWholeBytes = 4096, kPartBytes = 2560, kMaxPanel = 48;
  constexpr int64_t kElement = sizeof(typename Dot::Element);
  const int64_t n = a.acts->num_rows, tiles = (n + Dot::kMaxCols - 1) / Dot::kMaxCols, in = a.in_features;
  const bool whole = tiles == 1 || in * kElement <= kWholeBytes;
  const int64_t parts = whole ? 1 : (in * kElement + kPartBytes - 1) / kPartBytes;
  const int64_t depth = ((in + parts - 1) / parts + Dot::kStep - 1) / Dot::kStep * Dot::kStep;
  alignas(64) typename Dot::Sum waiting[kMaxPanel * Dot::kMaxCols];
  constexpr int64_t kRows = Dot::rows_for(Dot::kMaxCols);
  const int64_t fit = std::max<int64_t>(kPanelBytes / (in * kElement) / kRows, 1) * kRows;
  const int64_t panel = tiles == 1 ? out_end - out_begin : parts > 1 ? std::min(fit, kMaxPanel / kRows * kRows) : fit;
  for (int64_t feature = out_begin; feature < out_end; feature += panel) {
    const int64_t end = std::min(feature + panel, out_end);
    for (int64_t t = 0; t < tiles; ++t) {  // tiles of nearly equal width
      const int64_t begin = n * t / tiles, stop = n * (t + 1) / tiles;
      for (int64_t k = 0; k < in; k += depth)
        tile_cols<Dot, Dot::kMaxCols>(a, end, begin, stop - begin, {k, std::min(k + depth, in), waiting, feature});
    }
  }
}
