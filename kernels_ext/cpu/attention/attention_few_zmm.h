// How do a few queries, such as those of a token, attend over a chunk? Keys and values meet them in registers, unmoved.
//
// Included inside the anonymous namespace of attention_avx512bf16.cpp, after attention_pairs_zmm.h. The sums have the order of
// multiply_tiles over PairLayout, so that a query's bits do not depend on how many others there are.

constexpr int64_t kAhead = 96;  // slots between those that are read and those that are fetched meanwhile, into the L2 cache
constexpr int kFewRows = 8;  // queries whose sums lie in registers

inline __m512bh both_of(const uint16_t* p) {
  int32_t two;
  std::memcpy(&two, p, 4);
  return (__m512bh)_mm512_set1_epi32(two);
}

// words[c] = word c of 16 rows, of the 32 bytes at rows + r * stride. Rows r and r + 4 lie side by side until words of 4 x 4
// are transposed inside of 128 bits.
inline void transpose_half(const char* rows, int64_t stride, __m512i* words) {
  __m512 in[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const char* const row = rows + (i < 4 ? i : i + 4) * stride;
    const __m512 first = _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(row)));
    in[i] = _mm512_insertf32x8(first, _mm256_loadu_ps(reinterpret_cast<const float*>(row + 4 * stride)), 1);
  }
  __m512d columns[2][4];  // of rows 0 to 7, 8 to 15: word c in 128 bits, c + 4 in the next
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const auto lower = [&](int i) { return _mm512_castps_pd(_mm512_unpacklo_ps(in[4 * h + i], in[4 * h + i + 1])); };
    const auto upper = [&](int i) { return _mm512_castps_pd(_mm512_unpackhi_ps(in[4 * h + i], in[4 * h + i + 1])); };
    columns[h][0] = _mm512_unpacklo_pd(lower(0), lower(2));
    columns[h][1] = _mm512_unpackhi_pd(lower(0), lower(2));
    columns[h][2] = _mm512_unpacklo_pd(upper(0), upper(2));
    columns[h][3] = _mm512_unpackhi_pd(upper(0), upper(2));
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    words[c] = _mm512_castpd_si512(_mm512_shuffle_f64x2(columns[0][c], columns[1][c], 0x88));
    words[c + 4] = _mm512_castpd_si512(_mm512_shuffle_f64x2(columns[0][c], columns[1][c], 0xDD));
  }
}

struct FewQueries {
  const uint16_t* queries;  // [query][padded]
  float* scores;            // [query][kChunk]
  const uint16_t* weights;  // [query][kChunk]
  const float* rescale;     // [query]
  float* outputs;           // [query][padded]
  int64_t padded;
  int64_t ahead;  // bytes from a row to the one that is fetched meanwhile; 0: none

  template <int kRows>
  void fetch_rows(const char* rows, int64_t stride) const {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(rows + r * stride + ahead, 0, 2);
  }

  // Of the 16 slots whose keys lie at `rows`, the first of which is `slot` of the chunk.
  template <int kQueries>
  void score(const char* rows, int64_t stride, int64_t slot) const {
    __m512 sums[kQueries];
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i) sums[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < padded; d += kLanes) {
      if (d % kStep == 0) fetch_rows<kLanes>(rows + d * 2, stride);
      __m512i words[8];
      transpose_half(rows + d * 2, stride, words);
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c)
#pragma GCC unroll 8
        for (int i = 0; i < kQueries; ++i)
          sums[i] = _mm512_dpbf16_ps(sums[i], both_of(queries + i * padded + d + c * 2), (__m512bh)words[c]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i) _mm512_storeu_ps(scores + i * kChunk + slot, sums[i]);
  }

  // outputs = outputs * rescale + weights * values, of elements [d, d + kSteps * kStep) and slots [slot, slot + count), whose
  // values lie at `rows`.
  template <int kQueries, int kSteps>
  void add_columns(const char* rows, int64_t stride, int64_t slot, int64_t count, int64_t d) const {
    __m512 sums[kQueries][2 * kSteps];
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < 2 * kSteps; ++j)
        sums[i][j] = _mm512_mul_ps(_mm512_loadu_ps(outputs + i * padded + d + j * kLanes), _mm512_set1_ps(rescale[i]));
    const char* row = rows + d * 2;
    for (int64_t s = slot; s < slot + count; s += 2, row += 2 * stride) {
      __m512bh pairs[2 * kSteps];
#pragma GCC unroll 2
      for (int j = 0; j < kSteps; ++j) {
        fetch_rows<2>(row + j * 64, stride);
        const __m512i even = _mm512_loadu_si512(row + j * 64), odd = _mm512_loadu_si512(row + stride + j * 64);
        pairs[2 * j] = (__m512bh)_mm512_unpacklo_epi16(even, odd);
        pairs[2 * j + 1] = (__m512bh)_mm512_unpackhi_epi16(even, odd);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kQueries; ++i) {
        const __m512bh weight = both_of(weights + i * kChunk + s);
#pragma GCC unroll 4
        for (int j = 0; j < 2 * kSteps; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], weight, pairs[j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < 2 * kSteps; ++j) _mm512_storeu_ps(outputs + i * padded + d + j * kLanes, sums[i][j]);
  }

  template <int kQueries>
  void add(const char* rows, int64_t stride, int64_t slot, int64_t count) const {
    int64_t d = 0;
    if constexpr (kQueries <= 4)
      for (; d + 2 * kStep <= padded; d += 2 * kStep) add_columns<kQueries, 2>(rows, stride, slot, count, d);
    for (; d < padded; d += kStep) add_columns<kQueries, 1>(rows, stride, slot, count, d);
  }
};

// f.operator()<count>(queries).
template <int kQueries = kFewRows, class F>
inline void in_registers(const FewQueries& few, int count, const F& f) {
  if (count == kQueries) return f.template operator()<kQueries>(few);
  if constexpr (kQueries > 1) in_registers<kQueries - 1>(few, count, f);
}

// Queries [first, first + count) of the block, at most kFewRows, which see the same slots of the chunk: `seen`.
template <class Terms>
inline void attend_few(const mlspec_attention_args& args, int first, int count, int64_t chunk, SlotRange seen,
                       QueryBlock<Terms>& block) {
  const SlotRange steps = steps_of(seen, chunk);
  const bool whole = block.rows.in_cache(args, chunk + steps.begin, chunk + steps.end, seen);
  const bool follows = whole && chunk + kChunk + kAhead <= block.rows.end;
  FewQueries few{block.queries + first * block.padded, block.scores, block.weights, block.rescale,
                 block.outputs + first * block.padded, block.padded, follows ? kAhead * block.rows.row_stride(args) : 0};
  for (int64_t slot = steps.begin; slot < steps.end; slot += kLanes) {
    if (seen.within(chunk + slot, chunk + slot + kLanes).empty()) continue;
    if (!whole) block.rows.prefetch(args, args.keys, chunk + slot + kAhead, chunk + slot + kAhead + kLanes);
    block.rows.template find<Terms>(args, args.keys, chunk + slot, seen);
    in_registers(few, count, [&]<int kQueries>(const FewQueries& some) {
      some.score<kQueries>(block.rows.first, block.rows.stride, slot);
    });
  }
  update_softmax(args, first, count, chunk, false, block);
  const int64_t stretch = whole ? steps.end - steps.begin : kLanes;
  alignas(64) static constexpr float kOnes[kFewRows] = {1, 1, 1, 1, 1, 1, 1, 1};
  for (int64_t slot = steps.begin; slot < steps.end; slot += stretch) {
    if (!whole) block.rows.prefetch(args, args.values, chunk + slot + kAhead, chunk + slot + kAhead + kLanes);
    block.rows.template find<Terms>(args, args.values, chunk + slot, seen);
    in_registers(few, count, [&]<int kQueries>(const FewQueries& some) {
      some.add<kQueries>(block.rows.first, block.rows.stride, slot, stretch);
    });
    few.rescale = kOnes;
  }
}
