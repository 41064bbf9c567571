// How does a block of queries attend over the slots of one key head, each query as if it were alone?
//
// Included inside the anonymous namespaces of attention_<isa>.cpp, after Vec, row_ops_math.h and attention_cache.h.
//
// Softmax over chunks of 64 absolute slots, ascending, with a running maximum and sum (Milakov and Gimelshein 2018; tiled
// as in FlashAttention, Dao et al. 2022). Keys of a chunk are transposed, so that a score is one sum over the head's
// elements in a lane of its own, and an output one sum over slots: `Terms` says of which factors, and one of its
// multiplications adds either, always in ascending order. So tiles, blocks and edges give the bits that a query alone gets.
// A slot that a query may not see has weight zero: it adds zero. Where a value that some queries see is not finite, which zero
// does not make zero, each query reads the values again, zeros in the place of those it may not see.

constexpr int64_t kBlockElements = 16384;  // of the queries of a block: 7 heads of 64 of 32 tokens fit
constexpr int64_t kMaxQueries = 256;
constexpr float kLog2OfE = 1.44269504f;  // scores are exponents of 2
constexpr int kTileQueries = kLanes;  // queries between two updates of their maxima

// c[row][0..columns) = c * rescale[row] + a[row] * b; without rescale c starts at zero.
template <class Element>
struct Factors {
  const Element* a;  // [rows][a_stride]
  int64_t a_stride;
  const Element* b;  // [depth / kPair][b_stride][kPair]
  int64_t b_stride;
  int64_t depth, columns;  // multiples of kStep
  float* c;                // [rows][c_stride]
  int64_t c_stride;
  const float* rescale;    // [rows], or null
};

// The slots that a query may see: of `range` those of the first chunk, and from `recent` on.
struct Visible {
  SlotRange range;
  int64_t recent;

  // Of one chunk they lie side by side.
  SlotRange in(int64_t chunk) const {
    return {std::max({range.begin, chunk, chunk > 0 ? recent : 0}), std::min(range.end, chunk + kChunk)};
  }

  // The chunk from which on slots are looked at; behind the first one: from `recent` on.
  int64_t first_chunk() const { return range.begin < kChunk ? 0 : std::max(range.begin, recent) / kChunk * kChunk; }
  int64_t chunk_behind(int64_t chunk) const { return std::max(chunk + kChunk, recent / kChunk * kChunk); }
};

template <class Terms>
struct QueryBlock {
  using Element = typename Terms::Element;
  alignas(64) Element queries[kBlockElements];          // [query][padded]
  alignas(64) float outputs[kBlockElements];            // [query][padded], not yet divided by the sum
  alignas(64) Element keys[kMaxHeadDim * kChunk];       // [padded / kPair][slot of the chunk][kPair]
  alignas(64) Element values[kMaxHeadDim * kChunk];     // [slot of the chunk / kPair][padded][kPair]
  alignas(64) float scores[kTileQueries * kChunk];      // of a tile: [query][slot of the chunk]
  alignas(64) Element weights[kTileQueries * kChunk];   // the same after the softmax
  alignas(64) float sums[kMaxQueries * kLanes];         // [query][lane]: of weights, in each lane those of some slots
  alignas(64) float largest[kMaxQueries + kTileQueries], rescale[kTileQueries];
  Visible visible[kMaxQueries];
  int64_t next_chunk;  // that is attended to behind this one
  CacheRows rows;
  int num_queries;
  int64_t padded;  // head_dim rounded up to kStep; the rest is zero

  // Whether the next keys are fetched while scores become weights, a share for each query, and not while values are loaded:
  // a few queries are done with that too soon.
  bool spreads() const { return num_queries >= 6; }
};

inline Visible visible_slots(const mlspec_attention_args& args, int64_t token) {
  const int64_t position = args.first_position + token;
  const auto last = [&](int64_t count) { return count > 0 ? std::max<int64_t>(0, position - count + 1) : 0; };
  const int64_t stretch = args.span > 0 ? position / args.span * args.span : 0;
  return {{std::max(last(args.window), stretch), position + 1}, last(args.draft_window)};
}

inline const float* query_of(const mlspec_attention_args& args, int64_t index) {
  return args.q + index / args.num_heads * args.q_token_stride + index % args.num_heads * args.head_dim;
}

inline float* output_of(const mlspec_attention_args& args, int64_t index) {
  return args.out + index / args.num_heads * args.out_token_stride + index % args.num_heads * args.head_dim;
}

template <class Terms>
inline void start_block(const mlspec_attention_args& args, int64_t first, int64_t count, QueryBlock<Terms>& block) {
  block.num_queries = static_cast<int>(count);
  std::memset(block.outputs, 0, sizeof(float) * count * block.padded);
  std::memset(block.sums, 0, sizeof(float) * count * kLanes);
  std::fill_n(block.largest, count + kTileQueries, -INFINITY);
  for (int64_t i = 0; args.sinks && i < count; ++i) {  // seen first: its weight is 2^0
    block.largest[i] = args.sinks[(first + i) % args.num_heads] * kLog2OfE;
    block.sums[i * kLanes] = 1.f;
  }
  alignas(64) float query[kMaxHeadDim];
  std::memset(query, 0, sizeof(float) * block.padded);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(query, query_of(args, first + i), sizeof(float) * args.head_dim);
    for (int64_t d = 0; d < block.padded; d += kStep) Terms::store_query(query + d, block.queries + i * block.padded + d);
    block.visible[i] = visible_slots(args, (first + i) / args.num_heads);
  }
}

// 2^x of x <= 0: 2^0 is 1, and -Inf gives 0. Five terms of a minimax fit over [-1/2, 1/2]: the relative error is below 2^-22.
inline Vec power_of_two(Vec x) {
  constexpr float kShift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  x = max(Vec::all(-160.f), x);         // hands on a NaN
  const Vec shifted = x + Vec::all(kShift), n = shifted - Vec::all(kShift), r = x - n;
  Vec p = fma(Vec::all(0.00132647273f), r, Vec::all(0.00967151299f));
  p = fma(p, r, Vec::all(0.0555073358f));
  p = fma(p, r, Vec::all(0.240222424f));
  p = fma(p, r, Vec::all(0.693147004f));
  p = fma(p, r, Vec::all(1.f));
  return times_power_of_two(p, shifted, n);
}

// Scores of a query, scaled and capped, as powers of two, -Inf where it may not see; returns the largest.
template <class Terms>
inline float mask_scores(const mlspec_attention_args& args, const Visible& visible, int64_t chunk, float* scores) {
  const SlotRange seen = visible.in(chunk);
  const bool whole = seen.end - seen.begin == kChunk, capped = args.softcap > 0.f;
  const Vec scale = Vec::all(capped ? args.scale : args.scale * kLog2OfE);
  Vec most = Vec::all(-INFINITY);
  for (int j = 0; j < kChunk; j += kLanes) {
    Vec score = Vec::load(scores + j) * scale;
    if (capped) score = cap_softly(score, Vec::all(args.softcap)) * Vec::all(kLog2OfE);
    if (!whole)
      score = select(Vec::lanes_between(seen.begin - chunk - j, seen.end - chunk - j), score, Vec::all(-INFINITY));
    score.store(scores + j);
    most = max(score, most);
  }
  return Vec::largest(most);
}

// Turns the scores of a tile into weights and moves the running maxima and sums on.
template <class Terms>
inline void update_softmax(const mlspec_attention_args& args, int first, int count, int64_t chunk, bool fetch,
                           QueryBlock<Terms>& block) {
  alignas(64) float largest[kTileQueries];
  std::fill_n(largest, kTileQueries, -INFINITY);
  for (int i = 0; i < count; ++i)
    largest[i] = mask_scores<Terms>(args, block.visible[first + i], chunk, block.scores + i * kChunk);
  const Vec before = Vec::load(block.largest + first), now = max(Vec::load(largest), before);
  now.store(largest);
  power_of_two(before - now).store(block.rescale);
  for (int i = 0; i < count; ++i) {
    const Vec shift = Vec::all(largest[i]);
    const float* const scores = block.scores + i * kChunk;
    float* const sums = block.sums + (first + i) * kLanes;
    Vec sum = Vec::zero();
    for (int j = 0; j < kChunk; j += kStep) {
      const Vec weights[kStep / kLanes] = {power_of_two(Vec::load(scores + j) - shift),
                                           power_of_two(Vec::load(scores + j + kLanes) - shift)};
      sum = Terms::store_weights(weights, block.weights + i * kChunk + j, sum);
    }
    fma(Vec::load(sums), Vec::all(block.rescale[i]), sum).store(sums);
    block.largest[first + i] = largest[i];
    const int64_t next = block.next_chunk;
    if (fetch) block.rows.prefetch(args, args.keys, next + kChunk * i / count, next + kChunk * (i + 1) / count);
  }
}

// Slots of a chunk that are read, in whole steps: [begin, end) counts from its first slot.
inline SlotRange steps_of(SlotRange seen, int64_t chunk) {
  return {(seen.begin - chunk) / kStep * kStep, (seen.end - chunk + kStep - 1) / kStep * kStep};
}

template <class Terms>
inline void add_values(const QueryBlock<Terms>& block, int first, int count, int tile_first, SlotRange steps, float* outputs) {
  Terms::multiply({block.weights + (first - tile_first) * kChunk + steps.begin, kChunk,
                   block.values + steps.begin * block.padded, block.padded, steps.end - steps.begin, block.padded,
                   outputs + first * block.padded, block.padded, block.rescale + (first - tile_first)},
                  count);
}

// Queries [first, first + count) of the block, at most a tile, which all see slots of the chunk.
template <class Terms>
inline void attend_tile(const mlspec_attention_args& args, int first, int count, int64_t chunk, SlotRange seen, bool finite,
                        bool fetch, QueryBlock<Terms>& block) {
  const SlotRange steps = steps_of(seen, chunk);
  Terms::multiply({block.queries + first * block.padded, block.padded, block.keys + steps.begin * Terms::kPair, kChunk,
                   block.padded, steps.end - steps.begin, block.scores + steps.begin, kChunk, nullptr},
                  count);
  update_softmax(args, first, count, chunk, fetch, block);
  if (finite) return add_values(block, first, count, first, steps, block.outputs);
  for (int i = first; i < first + count; ++i) {
    load_values<Terms, false>(args, chunk, block.visible[i].in(chunk), steps, block);
    add_values(block, i, 1, first, steps, block.outputs);
  }
}

template <class Terms>
inline void attend_few(const mlspec_attention_args& args, int first, int count, int64_t chunk, SlotRange seen,
                       QueryBlock<Terms>& block);

template <class Terms>
inline void attend_chunk(const mlspec_attention_args& args, int64_t chunk, QueryBlock<Terms>& block) {
  int begin = 0, end = block.num_queries;
  const SlotRange seen{block.visible[begin].in(chunk).begin, block.visible[end - 1].in(chunk).end};
  const SlotRange steps = steps_of(seen, chunk);
  while (block.visible[begin].in(chunk).empty()) ++begin;
  while (block.visible[end - 1].in(chunk).empty()) --end;
  const bool alike = block.visible[begin].in(chunk).end >= seen.end && block.visible[end - 1].in(chunk).begin <= seen.begin;
  if constexpr (Terms::kFewQueries > 0)
    if (alike && end - begin <= Terms::kFewQueries) return attend_few(args, begin, end - begin, chunk, seen, block);
  load_keys<Terms>(args, chunk, seen, steps, block);
  const bool finite = alike ? load_values<Terms, false>(args, chunk, seen, steps, block)
                            : load_values<Terms, true>(args, chunk, seen, steps, block);
  for (int i = begin; i < end; i += kTileQueries)
    attend_tile(args, i, std::min(kTileQueries, end - i), chunk, seen, finite, i == begin && block.spreads(), block);
}

template <class Terms>
void attend_block(const mlspec_attention_args& args, int64_t first, int64_t count, QueryBlock<Terms>& block) {
  start_block(args, first, count, block);
  const Visible& most = block.visible[0];  // none behind it sees a slot further back
  block.rows.end = block.visible[count - 1].range.end;
  for (int64_t chunk = most.first_chunk(); chunk < block.rows.end; chunk = block.next_chunk) {
    block.next_chunk = most.chunk_behind(chunk);
    attend_chunk(args, chunk, block);
  }
  for (int i = 0; i < count; ++i) {
    const Vec factor = Vec::all(1.f / Vec::sum(Vec::load(block.sums + i * kLanes)));
    float* const output = block.outputs + i * block.padded;
    Terms::restore_order(output, block.padded);
    float* const to = output_of(args, first + i);
    int64_t d = 0;  // plus zero: what a sum of nothing but zeros has for a sign is nobody's business
    for (; d + kLanes <= args.head_dim; d += kLanes) fma(Vec::load(output + d), factor, Vec::zero()).store(to + d);
    if (d < args.head_dim) fma(Vec::load(output + d), factor, Vec::zero()).store_first(to + d, args.head_dim - d);
  }
}

template <class Terms>
void attend(const mlspec_attention_args& args) {
  const int64_t total = args.num_tokens * args.num_heads;
  if (total <= 0) return;
  QueryBlock<Terms> block;
  block.padded = (args.head_dim + kStep - 1) / kStep * kStep;
  const int64_t most = std::min(kMaxQueries, kBlockElements / block.padded / kTileQueries * kTileQueries);
  const int64_t blocks = (total + most - 1) / most;
  const int64_t count = ((total + blocks - 1) / blocks + kTileQueries - 1) / kTileQueries * kTileQueries;
  for (int64_t first = 0; first < total; first += count)
    attend_block(args, first, std::min(count, total - first), block);
}
