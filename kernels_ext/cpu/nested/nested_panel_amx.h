// How do many rows share the rebuilding of a nested weight? A panel of it is rebuilt once, and the rows' sums wait in memory.
//
// Included inside the anonymous namespace of nested_linear_amx.cpp. A sum that is stored and loaded again is the same sum.

constexpr int64_t kPanelTiles = 4, kPanelSteps = 32, kPanelRows = 512;

struct Panel {
  alignas(64) Pairs pairs[kPanelTiles][kPanelSteps];              // 128 KB
  alignas(64) float sums[kPanelTiles][kPanelRows][kTileOutputs];  // 128 KB
};

// T tiles from `tile` of the panel on times M tiles of rows from `row` on, over `count` steps: sum (i, m) is register i * M + m.
template <int T, int M>
struct PanelProduct {
  static constexpr int weight_register(int i) { return i == 0 ? kWeights : kOtherRows; }
  static constexpr int x_register(int m) { return m == M - 1 ? kLastRows : kFullRows; }
  Panel& panel;
  int64_t tile, row;

  template <int kSum = 0>
  void load_sums() const {
    if constexpr (kSum < T * M) load<kSum>(panel.sums[tile + kSum / M][row + kSum % M * kTileRows], 64), load_sums<kSum + 1>();
  }
  template <int kSum = 0>
  void store_sums() const {
    if constexpr (kSum < T * M) store<kSum>(panel.sums[tile + kSum / M][row + kSum % M * kTileRows], 64), store_sums<kSum + 1>();
  }
  template <int i = 0>
  inline void multiply(int64_t step) const {
    if constexpr (i < T) {
      load<weight_register(i)>(panel.pairs[tile + i][step], 64);
      multiply_add<i * M, x_register(0), weight_register(i)>();
      if constexpr (M == 2) multiply_add<i * M + 1, x_register(1), weight_register(i)>();
      multiply<i + 1>(step);
    }
  }
  // x: the first row's elements of the first step. ahead: the steps to fetch meanwhile, null: none.
  void run(const uint16_t* x, int64_t in, int64_t count, const TileSteps* ahead, int64_t tile_steps) const {
    load_sums();
    for (int64_t step = 0; step < count; ++step, x += kBlock) {
      for (int i = 0; ahead && i < T; ++i) ahead->prefetch<1>(i * tile_steps + step, 0);
      if constexpr (M == 2) load<kFullRows>(x, in * 2);
      load<kLastRows>(x + (M - 1) * kTileRows * in, in * 2);
      multiply(step);
    }
    store_sums();
  }
};

// The first `count` tiles of a panel times one or two tiles of rows.
template <int M>
void multiply_panel(Panel& panel, int64_t count, int64_t row, int64_t rows, const uint16_t* x, int64_t in, int64_t steps,
                    const TileSteps* ahead, int64_t tile_steps) {
  const int last_rows = static_cast<int>(rows - (M - 1) * kTileRows);
  if (count > 1) Product<2, M>::configure(last_rows);
  for (int64_t tile = 0; tile < count; tile += 2) {
    const TileSteps next = ahead ? ahead->from(tile * tile_steps) : TileSteps{};
    if (tile + 1 < count) {
      PanelProduct<2, M>{panel, tile, row}.run(x, in, steps, ahead ? &next : nullptr, tile_steps);
    } else {
      Product<1, M>::configure(last_rows);
      PanelProduct<1, M>{panel, tile, row}.run(x, in, steps, ahead ? &next : nullptr, tile_steps);
    }
  }
}

// Tiles [tile, tile + count) times rows [token, token + rows).
void panel_product(const mlspec_linear_args& a, Panel& panel, int64_t tile, int64_t count, int64_t token, int64_t rows) {
  const int64_t in = a.in_features, steps = in / kBlock;
  const TileSteps tiles(a, tile);
  const Rebuild rebuild;
  for (int64_t i = 0; i < count; ++i) std::fill(panel.sums[i][0], panel.sums[i][rows], 0.0f);
  for (int64_t first = 0; first < steps; first += kPanelSteps) {
    const int64_t size = std::min(kPanelSteps, steps - first);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t s = 0; s < size; ++s) tiles.rebuild(rebuild, i * steps + first + s, panel.pairs[i][s]);
    const TileSteps ahead = tiles.from(first + size < steps ? first + size : count * steps);
    for (int64_t row = 0; row < rows; row += 2 * kTileRows) {
      const int64_t group = std::min<int64_t>(rows - row, 2 * kTileRows);
      const uint16_t* x = static_cast<const uint16_t*>(a.acts->data) + (token + row) * in + first * kBlock;
      const auto multiply_group = group > kTileRows ? multiply_panel<2> : multiply_panel<1>;
      multiply_group(panel, count, row, group, x, in, size, row == 0 ? &ahead : nullptr, steps);
    }
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t t = 0; t < rows; ++t) add_row(a, tile + i, token + t, panel.sums[i][t]);
}

void panel_linear(const mlspec_linear_args& a, int64_t tile, int64_t tile_end) {
  Panel panel;
  const int64_t tokens = a.acts->num_rows, passes = (tokens + kPanelRows - 1) / kPanelRows;
  for (; tile < tile_end; tile += kPanelTiles) {
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t token = pass * tokens / passes, rows = (pass + 1) * tokens / passes - token;
      panel_product(a, panel, tile, std::min(kPanelTiles, tile_end - tile), token, rows);
    }
  }
}
