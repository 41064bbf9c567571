// How is a row multiplied by Hadamard matrices? One order of additions, and so the same bits, for every instruction set.
//
// Included inside the anonymous namespace of hadamard_<isa>.cpp, after `Vec`, kLanes floats, 8 or 16, which has:
//   load(p), store(p), all(x), +, -, *, fma(a, b, c) = a * b + c
//   short_levels(): the sums and differences of lanes 1, then 2, then 4, and of 16 lanes then 8 apart
// A factor of fma is 1 or -1, so its product is exact and it rounds as a sum does.

constexpr int64_t kLanes = Vec::kLanes;

// x as [.. ][2^kLevels][step]: kLevels levels of sums and differences in registers, then times factor. step: of kLanes.
template <int kLevels>
void vector_pass(float* x, int64_t count, int64_t step, float factor) {
  constexpr int kParts = 1 << kLevels;
  const Vec times = Vec::all(factor);
  for (float* group = x; group < x + count; group += kParts * step)
    for (int64_t i = 0; i < step; i += kLanes) {
      Vec v[kParts];
      for (int t = 0; t < kParts; ++t) v[t] = Vec::load(group + t * step + i);
      for (int apart = 1; apart < kParts; apart *= 2)
        for (int t = 0; t < kParts; ++t) {
          if (t & apart) continue;
          const Vec low = v[t], high = v[t + apart];
          v[t] = low + high;
          v[t + apart] = low - high;
        }
      for (int t = 0; t < kParts; ++t) (v[t] * times).store(group + t * step + i);
    }
}

// One level, of pairs that are no multiple of kLanes apart.
inline void scalar_pass(float* x, int64_t count, int64_t step) {
  for (float* group = x; group < x + count; group += 2 * step)
    for (int64_t i = 0; i < step; ++i) {
      const float low = group[i], high = group[step + i];
      group[i] = low + high;
      group[step + i] = low - high;
    }
}

inline void multiply(float* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// x [powers][inner], times Sylvester's matrix and factor.
inline void rotate_powers(float* x, int64_t powers, int64_t inner, float factor) {
  const int64_t count = powers * inner;
  int64_t half = 1;
  if (inner == 1 && powers >= kLanes) {
    for (int64_t i = 0; i < count; i += kLanes) Vec::load(x + i).short_levels().store(x + i);
    half = kLanes;
  }
  for (; half < powers && half * inner % kLanes != 0; half *= 2) scalar_pass(x, count, half * inner);
  if (half >= powers) {
    if (factor != 1.0f) multiply(x, count, factor);
    return;
  }
  for (; powers / half > 8; half *= 8) vector_pass<3>(x, count, half * inner, 1.0f);
  switch (powers / half) {
    case 8: return vector_pass<3>(x, count, half * inner, factor);
    case 4: return vector_pass<2>(x, count, half * inner, factor);
    default: return vector_pass<1>(x, count, half * inner, factor);
  }
}

// Columns [column, column + kWide * kLanes) of x [order][stride], times the matrix and factor.
template <int kWide>
void product_columns(const mlspec_hadamard& how, float* x, int64_t stride, float factor) {
  constexpr int kRows = 4;  // of the order, which is a multiple of it
  alignas(64) float columns[MLSPEC_HADAMARD_MAX_ORDER * kWide * kLanes];  // side by side: rows of x share few sets of a cache
  for (int64_t j = 0; j < how.order; ++j)
    for (int w = 0; w < kWide; ++w) Vec::load(x + j * stride + w * kLanes).store(columns + (j * kWide + w) * kLanes);
  const Vec times = Vec::all(factor);
  for (int64_t i = 0; i < how.order; i += kRows) {
    const float* const rows = how.matrix + i * how.order;
    Vec sums[kRows][kWide];
    for (int r = 0; r < kRows; ++r)
      for (int w = 0; w < kWide; ++w) sums[r][w] = Vec::all(rows[r * how.order]) * Vec::load(columns + w * kLanes);
    for (int64_t j = 1; j < how.order; ++j)
      for (int r = 0; r < kRows; ++r) {
        const Vec sign = Vec::all(rows[r * how.order + j]);
        for (int w = 0; w < kWide; ++w) sums[r][w] = Vec::fma(sign, Vec::load(columns + (j * kWide + w) * kLanes), sums[r][w]);
      }
    for (int r = 0; r < kRows; ++r)
      for (int w = 0; w < kWide; ++w) (sums[r][w] * times).store(x + (i + r) * stride + w * kLanes);
  }
}

inline void product_column(const mlspec_hadamard& how, float* x, int64_t stride, float factor) {
  float column[MLSPEC_HADAMARD_MAX_ORDER];
  for (int64_t j = 0; j < how.order; ++j) column[j] = x[j * stride];
  for (int64_t i = 0; i < how.order; ++i) {
    float sum = how.matrix[i * how.order] * column[0];
    for (int64_t j = 1; j < how.order; ++j) sum += how.matrix[i * how.order + j] * column[j];
    x[i * stride] = sum * factor;
  }
}

inline void rotate_row(const mlspec_hadamard& how, int64_t width, float* x) {
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(how.size)));
  const int64_t powers = how.size / how.order, part = powers * how.inner;
  for (float* block = x; block < x + width; block += how.size * how.inner) {
    if (!how.matrix) {
      rotate_powers(block, powers, how.inner, factor);
      continue;
    }
    for (int64_t j = 0; j < how.order; ++j) rotate_powers(block + j * part, powers, how.inner, 1.0f);
    int64_t column = 0;
    for (; column + 2 * kLanes <= part; column += 2 * kLanes) product_columns<2>(how, block + column, part, factor);
    for (; column + kLanes <= part; column += kLanes) product_columns<1>(how, block + column, part, factor);
    for (; column < part; ++column) product_column(how, block + column, part, factor);
  }
}

#define MLSPEC_HADAMARD(isa)                                                                          \
  extern "C" void mlspec_hadamard_##isa(const mlspec_hadamard* how, int64_t width, float* x) { \
    rotate_row(*how, width, x);                                                                       \
  }
