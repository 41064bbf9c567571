// How do queries and weights meet keys and values as floats? One fused multiply-add after the other, of Vecs.
//
// Included inside the anonymous namespaces of attention_<isa>.cpp, after transpose_words and attention_blocks.h.

// a tile of kRows rows of a and kVecs Vecs of columns; Terms: Operand, load(b), all(a), add(sum, a, b)
template <class Terms, int kRows, int kVecs>
inline void multiply_tile(const Factors<typename Terms::Element>& f, int64_t row, int64_t column) {
  Vec sums[kRows][kVecs];
  float* const c = f.c + row * f.c_stride + column;
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j)
      sums[i][j] = f.rescale ? Vec::load(c + i * f.c_stride + j * kLanes) * Vec::all(f.rescale[row + i]) : Vec::zero();
  const auto* a = f.a + row * f.a_stride;
  const auto* b = f.b + column * Terms::kPair;
  for (int64_t k = 0; k < f.depth; k += Terms::kPair, a += Terms::kPair, b += f.b_stride * Terms::kPair) {
    typename Terms::Operand columns[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) columns[j] = Terms::load(b + j * kLanes * Terms::kPair);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const typename Terms::Operand factor = Terms::all(a + i * f.a_stride);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sums[i][j] = Terms::add(sums[i][j], factor, columns[j]);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) sums[i][j].store(c + i * f.c_stride + j * kLanes);
}

template <class Terms, int kRows>
inline void multiply_rows(const Factors<typename Terms::Element>& f, int64_t row) {
  int64_t column = 0;
  for (; column + Vec::kTile * kLanes <= f.columns; column += Vec::kTile * kLanes)
    multiply_tile<Terms, kRows, Vec::kTile>(f, row, column);
  for (; column < f.columns; column += kLanes) multiply_tile<Terms, kRows, 1>(f, row, column);
}

// The last rows of a call: fewer than a tile has.
template <class Terms, int kRows>
inline void multiply_rest(const Factors<typename Terms::Element>& f, int64_t row, int rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_rows<Terms, kRows>(f, row);
    multiply_rest<Terms, kRows - 1>(f, row, rows);
  }
}

template <class Terms>
inline void multiply_tiles(const Factors<typename Terms::Element>& f, int rows) {
  int row = 0;
  for (; row + Vec::kTile <= rows; row += Vec::kTile) multiply_rows<Terms, Vec::kTile>(f, row);
  multiply_rest<Terms, Vec::kTile - 1>(f, row, rows - row);
}

// Keys and values of any dtype, widened; what CacheRows widened are floats.
struct FloatTerms {
  using Element = float;
  using Operand = Vec;
  static constexpr int kPair = 1;
  static constexpr int kFewQueries = 0;

  static Vec load(const float* p) { return Vec::load(p); }
  static Vec all(const float* p) { return Vec::all(*p); }
  static Vec add(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
  static void multiply(const Factors<float>& f, int rows) { multiply_tiles<FloatTerms>(f, rows); }

  static void store_query(const float* from, float* to) { std::memcpy(to, from, kStep * sizeof(float)); }

  static void restore_order(float*, int64_t) {}

  // kStep values of codes, as elements
  static void store_widened(Vec first, Vec second, char* to) {
    float values[kStep];
    first.store(values);
    second.store(values + kLanes);
    std::memcpy(to, values, sizeof values);
  }

  // Of 16 codes the elements, and those of kStep nibbles.
  using Table = Vec;
  static Table table(Vec values) { return values; }
  static void store_looked_up(const Table& table, const uint8_t* from, char* to) {
    Vec values[2];
    Vec::look_up_nibbles(table, from, values);
    store_widened(values[0], values[1], to);
  }

  // kStep weights; -> sum plus the weights, lane by lane
  static Vec store_weights(const Vec* from, float* to, Vec sum) {
    from[0].store(to);
    from[1].store(to + kLanes);
    return sum + (from[0] + from[1]);
  }

  // to[element][stride], of 16 slots
  static void load_keys(const mlspec_attention_args& args, const CacheRows& rows, int64_t padded, float* to, int64_t stride) {
    if (args.kv_dtype != MLSPEC_BFLOAT16) {
      for (int64_t d = 0; d < padded; d += kLanes)
        transpose_words(rows.first + d * 4, rows.stride, reinterpret_cast<uint32_t*>(to + d * stride), stride);
      return;
    }
    for (int64_t d = 0; d < padded; d += 2 * kLanes) {
      alignas(64) uint32_t pairs[kLanes * kLanes];
      transpose_words(rows.first + d * 2, rows.stride, pairs, kLanes);
      for (int k = 0; k < kLanes; ++k) {
        uint32_t words[2][kLanes];
        for (int s = 0; s < kLanes; ++s) words[0][s] = pairs[k * kLanes + s] << 16;
        for (int s = 0; s < kLanes; ++s) words[1][s] = pairs[k * kLanes + s] & 0xFFFF0000u;
        std::memcpy(to + (d + 2 * k) * stride, words[0], sizeof words[0]);
        std::memcpy(to + (d + 2 * k + 1) * stride, words[1], sizeof words[1]);
      }
    }
  }

  // to[slot][padded], of 16 slots; -> products plus zero times each, where asked
  template <bool kAsk>
  static Vec load_values(const mlspec_attention_args& args, const CacheRows& rows, int64_t padded, float* to, Vec products) {
    for (int s = 0; s < kLanes; ++s) {
      const char* const row = rows.first + s * rows.stride;
      for (int64_t d = 0; d < padded; d += kLanes) {
        const bool wide = args.kv_dtype != MLSPEC_BFLOAT16;
        const Vec value = wide ? Vec::load(reinterpret_cast<const float*>(row) + d)
                               : Vec::load_bfloat16(reinterpret_cast<const uint16_t*>(row) + d);
        value.store(to + s * padded + d);
        if (kAsk) products = fma(value, Vec::zero(), products);
      }
    }
    return products;
  }
};
