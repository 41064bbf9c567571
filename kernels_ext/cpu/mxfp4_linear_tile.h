// How is a tile of MXFP4 weight rows times x rows summed? One algorithm for every instruction set.
//
// Included by each mxfp4_linear_<isa>.cpp inside its anonymous namespace, after `Vec` and `#pragma GCC target`, so
// that every function here is compiled for that instruction set and shared with no other file. Vec (16 floats) has:
//   zero(), load(p), fma(a, b, c) = a * b + c, sum(v) by halving, Decoder(&scale).decode(bytes, even, odd),
//   kMaxCols (x rows of a tile), rows_for(cols) (weight rows of a tile).

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline uint16_t to_bfloat16(float value) {  // round to nearest, ties to even
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline uint16_t to_float16(float value) {  // round to nearest, ties to even
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7FFFFFFFu;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and above round to Inf
  if (magnitude < 0x38800000u) {                        // subnormal: adding 0.5 makes the FPU round at bit 2^-24
    return sign | static_cast<uint16_t>(float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3F000000u);
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>(rounded >> 13);
}

inline float from_float16(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  // 2^112 moves the exponent bias from 15 to 127 and normalises subnormals; Inf and NaN keep the largest exponent.
  const float value = bits_to_float(shifted) * bits_to_float(0x77800000u);
  const uint32_t magnitude = shifted >= 0x0F800000u ? shifted | 0x7F800000u : float_to_bits(value);
  return bits_to_float(magnitude | static_cast<uint32_t>(half & 0x8000u) << 16);
}

inline float to_float(float value) { return value; }
struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
inline float to_float(Bfloat16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }
inline float to_float(Float16 value) { return from_float16(value.bits); }

template <typename T>
void split_rows(const T* x, int64_t in_features, int64_t row_begin, int64_t row_end, float* split_x) {
  for (int64_t block = row_begin * in_features; block < row_end * in_features; block += kBlock) {
    for (int i = 0; i < kBlock / 2; ++i) {
      split_x[block + i] = to_float(x[block + 2 * i]);
      split_x[block + kBlock / 2 + i] = to_float(x[block + 2 * i + 1]);
    }
  }
}

void split_x(const void* x, mlspec_dtype dtype, int64_t in_features, int64_t row_begin, int64_t row_end, float* out) {
  switch (dtype) {
    case MLSPEC_FLOAT32: return split_rows(static_cast<const float*>(x), in_features, row_begin, row_end, out);
    case MLSPEC_BFLOAT16: return split_rows(static_cast<const Bfloat16*>(x), in_features, row_begin, row_end, out);
    case MLSPEC_FLOAT16: return split_rows(static_cast<const Float16*>(x), in_features, row_begin, row_end, out);
  }
}

inline void store(const mlspec_mxfp4_linear_args& a, int64_t row, int64_t feature, float sum) {
  const float value = a.bias ? sum + a.bias[feature] : sum;
  const int64_t at = row * a.out_features + feature;
  switch (a.y_dtype) {
    case MLSPEC_FLOAT32: static_cast<float*>(a.y)[at] = value; return;
    case MLSPEC_BFLOAT16: static_cast<uint16_t*>(a.y)[at] = to_bfloat16(value); return;
    case MLSPEC_FLOAT16: static_cast<uint16_t*>(a.y)[at] = to_float16(value); return;
  }
}

// Code 0 (2^-127) makes subnormal products, a hundred times slower on some processors. Blocks of zeros carry that code
// too and are common (padded vocabularies): for them a scale of 0 gives the same zeros at full speed. The scale is
// handed on by address: a broadcast from memory costs no shuffle.
template <bool HasCodeZero>
inline const float* block_scale(uint8_t code, const uint8_t* bytes) {
  static constexpr float kZero = 0.0f;
  if (!HasCodeZero || code != 0) return &kE8M0.value[code];
  uint64_t halves[2];
  std::memcpy(halves, bytes, sizeof halves);
  return ((halves[0] | halves[1]) & 0x7777777777777777u) ? &kE8M0.value[0] : &kZero;
}

// f(0), f(1), ... f(N - 1) with constant arguments, so that arrays indexed by them live in registers.
template <int N, typename F>
__attribute__((always_inline)) inline void unroll(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

template <int Rows, int Cols, bool HasCodeZero>
__attribute__((noinline)) void tile(const mlspec_mxfp4_linear_args& a, int64_t feature, int64_t x_row) {
  const int64_t in = a.in_features, blocks = in / kBlock, bytes = blocks * kBlockBytes;
  const uint8_t* packed = a.weight_packed + feature * bytes;
  const uint8_t* scale = a.weight_scale + feature * blocks;
  const float* x = a.split_x + x_row * in;
  Vec acc[Rows * Cols];
  unroll<Rows * Cols>([&](auto i) __attribute__((always_inline)) { acc[i] = Vec::zero(); });
  for (int64_t b = 0; b < blocks; ++b, packed += kBlockBytes, ++scale, x += kBlock) {
    unroll<Rows>([&](auto r) __attribute__((always_inline)) {
      Vec even, odd;
      const uint8_t* at = packed + r * bytes;
      Vec::Decoder(block_scale<HasCodeZero>(scale[r * blocks], at)).decode(at, even, odd);
      unroll<Cols>([&](auto c) __attribute__((always_inline)) {
        Vec& sum = acc[r * Cols + c];
        sum = Vec::fma(Vec::load(x + c * in), even, sum);
        sum = Vec::fma(Vec::load(x + c * in + kBlock / 2), odd, sum);
      });
    });
  }
  unroll<Rows * Cols>([&](auto i) __attribute__((always_inline)) {
    store(a, x_row + i % Cols, feature + i / Cols, Vec::sum(acc[i]));
  });
}

template <int Rows, int Cols>
void checked_tile(const mlspec_mxfp4_linear_args& a, int64_t feature, int64_t x_row) {
  const int64_t blocks = a.in_features / kBlock;
  const bool has_code_zero = std::memchr(a.weight_scale + feature * blocks, 0, Rows * blocks) != nullptr;
  has_code_zero ? tile<Rows, Cols, true>(a, feature, x_row) : tile<Rows, Cols, false>(a, feature, x_row);
}

template <int Cols>
void tile_rows(const mlspec_mxfp4_linear_args& a, int64_t feature, int64_t end, int64_t x_row) {
  constexpr int kRows = Vec::rows_for(Cols);
  for (; feature + kRows <= end; feature += kRows) checked_tile<kRows, Cols>(a, feature, x_row);
  for (; feature < end; ++feature) checked_tile<1, Cols>(a, feature, x_row);
}

template <int Cols>
void tile_cols(const mlspec_mxfp4_linear_args& a, int64_t feature, int64_t end, int64_t x_row, int64_t cols) {
  if constexpr (Cols > 0) {
    if (cols == Cols) return tile_rows<Cols>(a, feature, end, x_row);
    tile_cols<Cols - 1>(a, feature, end, x_row, cols);
  }
}

// Features in groups whose codes stay in cache while every tile of x rows passes; x rows in panels that stay in L2.
void linear(const mlspec_mxfp4_linear_args& a, int64_t out_begin, int64_t out_end) {
  constexpr int64_t kPanelBytes = 512 << 10;
  const int64_t fit = kPanelBytes / (a.in_features * static_cast<int64_t>(sizeof(float)));
  const int64_t panel = fit > 2 * Vec::kMaxCols ? fit : 2 * Vec::kMaxCols;
  for (int64_t first = 0; first < a.num_rows; first += panel) {
    const int64_t last = first + panel < a.num_rows ? first + panel : a.num_rows;
    const int64_t tiles = (last - first + Vec::kMaxCols - 1) / Vec::kMaxCols;
    for (int64_t feature = out_begin; feature < out_end; feature += MLSPEC_FEATURE_GROUP) {
      const int64_t end = feature + MLSPEC_FEATURE_GROUP < out_end ? feature + MLSPEC_FEATURE_GROUP : out_end;
      for (int64_t t = 0; t < tiles; ++t) {  // tiles of nearly equal width: 9 rows are 4 + 5, not 6 + 3
        const int64_t begin = first + (last - first) * t / tiles, stop = first + (last - first) * (t + 1) / tiles;
        tile_cols<Vec::kMaxCols>(a, feature, end, begin, stop - begin);
      }
    }
  }
}
