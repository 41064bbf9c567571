// How does a block of queries attend over the slots of one key head, each query as if it were alone?
//
// Included inside the anonymous namespace of row_ops_<isa>.cpp, after row_ops_loops.h.
//
// Softmax over chunks of 64 absolute slots, ascending, with a running maximum and sum (Milakov and Gimelshein 2018; tiled
// as in FlashAttention, Dao et al. 2022). Keys, then values, of 16 slots at a time are widened into a buffer in L1 that all
// queries of the block read; a tile of queries shares each load of a value. Sums over head_dim run in 16 lanes and a fixed
// tree, sums over slots one slot after the other, so tiles, blocks and edges give the bits that a query alone gets. Slots
// that a query may not see are masked before its maximum, and their values are never multiplied.

constexpr int kChunk = 64;      // slots between two updates of the running maximum
constexpr int kSlots = 16;      // slots that are widened at a time
constexpr int kMaxQueries = 48;  // of one block: 9 tokens of 4 heads fit

struct SlotRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  SlotRange within(int64_t low, int64_t high) const { return {std::max(begin, low), std::min(end, high)}; }
};

struct QueryBlock {
  alignas(64) float queries[kMaxQueries * kMaxHeadDim];  // [query][padded], scores are their products with keys
  alignas(64) float outputs[kMaxQueries * kMaxHeadDim];  // [query][padded], not yet divided by the sum
  alignas(64) float addends[kMaxQueries * kMaxHeadDim];  // [query][padded]: what the chunk at hand adds to outputs
  alignas(64) float rows[kSlots * kMaxHeadDim];          // [padded / 16][slot][16]: keys or values of 16 slots
  alignas(64) float scores[kMaxQueries * kChunk];        // [query][slot of the chunk]; weights after the softmax
  float largest[kMaxQueries], sum[kMaxQueries], rescale[kMaxQueries];
  SlotRange visible[kMaxQueries];
  int num_queries;
  int64_t padded;  // head_dim rounded up to whole Vecs; the rest is zero
};

inline SlotRange visible_slots(const mlspec_attention_args& args, int64_t token) {
  const int64_t position = args.first_position + token;
  return {args.window > 0 ? std::max<int64_t>(0, position - args.window + 1) : 0, position + 1};
}

inline const float* query_of(const mlspec_attention_args& args, int64_t index) {
  return args.q + index / args.num_heads * args.q_token_stride + index % args.num_heads * args.head_dim;
}

inline float* output_of(const mlspec_attention_args& args, int64_t index) {
  return args.out + index / args.num_heads * args.out_token_stride + index % args.num_heads * args.head_dim;
}

inline void start_block(const mlspec_attention_args& args, int64_t first, int64_t count, QueryBlock& block) {
  block.num_queries = static_cast<int>(count);
  block.padded = (args.head_dim + kLanes - 1) / kLanes * kLanes;
  std::memset(block.outputs, 0, sizeof(float) * count * block.padded);
  std::memset(block.scores, 0, sizeof(float) * count * kChunk);
  for (int64_t i = 0; i < count; ++i) {
    float* query = block.queries + i * block.padded;
    std::memset(query + block.padded - kLanes, 0, sizeof(float) * kLanes);
    std::memcpy(query, query_of(args, first + i), sizeof(float) * args.head_dim);
    block.largest[i] = -INFINITY;
    block.sum[i] = 0.f;
    block.visible[i] = visible_slots(args, (first + i) / args.num_heads);
  }
}

inline void widen_slot(const mlspec_attention_args& args, const void* cache, int64_t slot, float* row) {
  const int64_t n = args.head_dim, whole = n / kLanes * kLanes;
  const float* full = static_cast<const float*>(cache) + slot * n;
  const uint16_t* half = static_cast<const uint16_t*>(cache) + slot * n;
  if (args.kv_dtype == MLSPEC_FLOAT32) {
    for (int64_t d = 0; d < whole; d += kLanes) Vec::load(full + d).store(row + d * kSlots);
    if (whole < n) Vec::load_first(full + whole, n - whole).store(row + whole * kSlots);
  } else {
    for (int64_t d = 0; d < whole; d += kLanes) Vec::load_bfloat16(half + d).store(row + d * kSlots);
    if (whole < n) widen_first<Bfloat16>(half + whole, n - whole).store(row + whole * kSlots);
  }
}

// The rows of slots [first, first + 16) of `cache`; zeros where no query of the block sees the slot.
inline void widen_slots(const mlspec_attention_args& args, const void* cache, int64_t first, SlotRange seen,
                        QueryBlock& block) {
  for (int s = 0; s < kSlots; ++s) {
    float* row = block.rows + s * kLanes;
    const bool visible = seen.begin <= first + s && first + s < seen.end;
    if (visible) widen_slot(args, cache, first + s, row);
    for (int64_t d = 0; !visible && d < block.padded; d += kLanes) Vec::zero().store(row + d * kSlots);
  }
}

// scores[0..16): products of one query with 16 rows.
inline void score_slots(const float* query, const float* rows, int64_t padded, float* scores) {
  for (int first = 0; first < kSlots; first += Vec::kDots) {
    Vec sums[Vec::kDots];
#pragma GCC unroll 16
    for (int s = 0; s < Vec::kDots; ++s) sums[s] = Vec::zero();
    for (int64_t d = 0; d < padded; d += kLanes) {
      const Vec q = Vec::load(query + d);
#pragma GCC unroll 16
      for (int s = 0; s < Vec::kDots; ++s) sums[s] = fma(q, Vec::load(rows + d * kSlots + (first + s) * kLanes), sums[s]);
    }
    Vec::store_sums(sums, scores + first);
  }
}

// Turns the scores of one chunk into weights and moves the running maximum and sum of query i on.
inline void update_softmax(const mlspec_attention_args& args, int i, int64_t chunk, QueryBlock& block) {
  const SlotRange seen = block.visible[i].within(chunk, chunk + kChunk);
  if (seen.empty()) return;
  float* scores = block.scores + i * kChunk;
  Vec weights[kChunk / kLanes], most = Vec::all(-INFINITY);
  for (int j = 0; j < kChunk / kLanes; ++j) {
    Vec score = Vec::load(scores + j * kLanes) * Vec::all(args.scale);
    if (args.softcap > 0.f) score = cap_softly(score, Vec::all(args.softcap));
    const auto mask = Vec::lanes_between(seen.begin - chunk - j * kLanes, seen.end - chunk - j * kLanes);
    weights[j] = select(mask, score, Vec::all(-INFINITY));
    most = max(weights[j], most);
  }
  const float largest = std::max(block.largest[i], Vec::largest(most));
  const Vec shift = Vec::all(largest), rescale = exp(Vec::all(block.largest[i]) - shift);
  for (int j = 0; j < kChunk / kLanes; ++j) {
    const auto mask = Vec::lanes_between(seen.begin - chunk - j * kLanes, seen.end - chunk - j * kLanes);
    weights[j] = select(mask, exp(weights[j] - shift), Vec::zero());
    weights[j].store(scores + j * kLanes);
  }
  const float sum = Vec::sum((weights[0] + weights[1]) + (weights[2] + weights[3]));
  block.sum[i] = Vec::first(fma(Vec::all(block.sum[i]), rescale, Vec::all(sum)));
  block.largest[i] = largest;
  block.rescale[i] = Vec::first(rescale);
}

// addends[kQueries][kVecs * 16] += weights[kQueries][begin..end) * rows[begin..end)
template <int kQueries, int kVecs>
inline void add_values(const float* weights, const float* rows, int64_t padded, int begin, int end, float* addends) {
  Vec sums[kQueries][kVecs];
  for (int i = 0; i < kQueries; ++i)
    for (int j = 0; j < kVecs; ++j) sums[i][j] = Vec::load(addends + i * padded + j * kLanes);
  for (int s = begin; s < end; ++s) {
    Vec values[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) values[j] = Vec::load(rows + (j * kSlots + s) * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; ++i) {
      const Vec weight = Vec::all(weights[i * kChunk + s]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sums[i][j] = fma(weight, values[j], sums[i][j]);
    }
  }
  for (int i = 0; i < kQueries; ++i)
    for (int j = 0; j < kVecs; ++j) sums[i][j].store(addends + i * padded + j * kLanes);
}

template <int kQueries>
inline void add_values_of(const float* weights, QueryBlock& block, int first_query, int begin, int end) {
  const int64_t padded = block.padded;
  float* addends = block.addends + first_query * padded;
  int64_t d = 0;
  for (; d + Vec::kTile * kLanes <= padded; d += Vec::kTile * kLanes)
    add_values<kQueries, Vec::kTile>(weights, block.rows + d * kSlots, padded, begin, end, addends + d);
  for (; d < padded; d += kLanes) add_values<kQueries, 1>(weights, block.rows + d * kSlots, padded, begin, end, addends + d);
}

// Values of the 16 slots from `first` on for a tile of queries: first what only some of them see, one by one, then what all see.
template <int kQueries>
inline void add_visible(int first_query, int64_t chunk, int64_t first, QueryBlock& block) {
  SlotRange shared{first, first + kSlots};
  for (int i = 0; i < kQueries; ++i) {
    const SlotRange& seen = block.visible[first_query + i];
    shared = shared.within(seen.begin, seen.end);
  }
  if (shared.empty()) shared = {first + kSlots, first + kSlots};
  const float* weights = block.scores + first_query * kChunk + (first - chunk);
  const auto add_alone = [&](int i, int64_t low, int64_t high) {
    const SlotRange range = block.visible[first_query + i].within(low, high);
    if (!range.empty())
      add_values_of<1>(weights + i * kChunk, block, first_query + i, range.begin - first, range.end - first);
  };
  for (int i = 0; i < kQueries; ++i) add_alone(i, first, shared.begin);
  add_values_of<kQueries>(weights, block, first_query, shared.begin - first, shared.end - first);
  for (int i = 0; i < kQueries; ++i) add_alone(i, shared.end, first + kSlots);
}

// The outputs so far, brought to the new maximum, plus the chunk's.
inline void add_chunk(int64_t chunk, QueryBlock& block) {
  for (int i = 0; i < block.num_queries; ++i) {
    if (block.visible[i].within(chunk, chunk + kChunk).empty()) continue;
    const Vec rescale = Vec::all(block.rescale[i]);
    float *output = block.outputs + i * block.padded, *addend = block.addends + i * block.padded;
    for (int64_t d = 0; d < block.padded; d += kLanes)
      fma(Vec::load(output + d), rescale, Vec::load(addend + d)).store(output + d);
  }
}

inline void attend_chunk(const mlspec_attention_args& args, int64_t chunk, SlotRange seen, QueryBlock& block) {
  seen = seen.within(chunk, chunk + kChunk);
  const int64_t first_slots = seen.begin / kSlots * kSlots;
  for (int64_t first = first_slots; first < seen.end; first += kSlots) {
    widen_slots(args, args.keys, first, seen, block);
    for (int i = 0; i < block.num_queries; ++i)
      score_slots(block.queries + i * block.padded, block.rows, block.padded, block.scores + i * kChunk + (first - chunk));
  }
  for (int i = 0; i < block.num_queries; ++i) update_softmax(args, i, chunk, block);
  std::memset(block.addends, 0, sizeof(float) * block.num_queries * block.padded);
  for (int64_t first = first_slots; first < seen.end; first += kSlots) {
    widen_slots(args, args.values, first, seen, block);
    int i = 0;
    for (; i + Vec::kTile <= block.num_queries; i += Vec::kTile) add_visible<Vec::kTile>(i, chunk, first, block);
    for (; i < block.num_queries; ++i) add_visible<1>(i, chunk, first, block);
  }
  add_chunk(chunk, block);
}

void attend_block(const mlspec_attention_args& args, int64_t first, int64_t count, QueryBlock& block) {
  start_block(args, first, count, block);
  const SlotRange seen{block.visible[0].begin, block.visible[count - 1].end};
  for (int64_t chunk = seen.begin / kChunk * kChunk; chunk < seen.end; chunk += kChunk)
    attend_chunk(args, chunk, seen, block);
  for (int i = 0; i < count; ++i) {
    const Vec factor = Vec::all(1.f / block.sum[i]);
    map(block.outputs + i * block.padded, args.head_dim, output_of(args, first + i), [&](Vec v) { return v * factor; });
  }
}

void attention(const mlspec_attention_args* args) {
  const int64_t total = args->num_tokens * args->num_heads;
  if (total <= 0) return;
  const int64_t blocks = (total + kMaxQueries - 1) / kMaxQueries;
  const int64_t count = ((total + blocks - 1) / blocks + Vec::kTile - 1) / Vec::kTile * Vec::kTile;
  QueryBlock block;
  for (int64_t first = 0; first < total; first += count)
    attend_block(*args, first, std::min(count, total - first), block);
}
