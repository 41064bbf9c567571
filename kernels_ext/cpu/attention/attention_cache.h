// How are the slots of a chunk read out of the cache? Whole rows of elements, zeros where nobody may look.
//
// Included inside the anonymous namespaces of attention_<isa>.cpp, after Vec.

constexpr int kChunk = 64;  // slots between two updates of the running maximum
constexpr int kStep = 32;   // elements of a head, and slots of a chunk, that are multiplied at a time

struct SlotRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  SlotRange within(int64_t low, int64_t high) const { return {std::max(begin, low), std::min(end, high)}; }
};

alignas(64) const char kZeroRow[kMaxHeadDim * sizeof(float)] = {};

// Where 16 slots' rows of whole steps lie: in the cache, or here where head_dim is not a multiple of kStep.
struct CacheRows {
  const char* row[kLanes];
  int64_t end;  // behind the last slot that the block reads
  alignas(64) char padded[kLanes][kMaxHeadDim * sizeof(float)];

  // Of slots [first, first + 16) of lanes[slots][head_dim]; rows of zeros outside `seen`.
  void find(const mlspec_attention_args& args, const void* lanes, int64_t first, SlotRange seen) {
    const int64_t bytes = row_bytes(args);
    for (int s = 0; s < kLanes; ++s) row[s] = static_cast<const char*>(lanes) + (first + s) * bytes;
    const bool whole = seen.begin <= first && first + kLanes <= seen.end;
    for (int s = 0; !whole && s < kLanes; ++s)
      if (first + s < seen.begin || first + s >= seen.end) row[s] = kZeroRow;
    for (int s = 0; args.head_dim % kStep != 0 && s < kLanes; ++s) pad(s, bytes, bytes / args.head_dim * kStep);
  }

  // 16 slots that are read next: rows side by side are no stream that processors follow by themselves.
  void prefetch(const mlspec_attention_args& args, const void* lanes, int64_t first) const {
    const int64_t bytes = row_bytes(args), size = std::min<int64_t>(kLanes, end - first) * bytes;
    const char* const next = static_cast<const char*>(lanes) + first * bytes;
    for (int64_t b = 0; b < size; b += 64) __builtin_prefetch(next + b);
  }

  static int64_t row_bytes(const mlspec_attention_args& args) {
    return args.head_dim * (args.kv_dtype == MLSPEC_FLOAT32 ? 4 : 2);
  }

  // Row s, of so many bytes, up to the end of its last step.
  void pad(int s, int64_t bytes, int64_t step) {
    std::memset(padded[s] + bytes / step * step, 0, step);
    std::memcpy(padded[s], row[s], bytes);
    row[s] = padded[s];
  }
};

// Slots `steps` of the chunk, those outside `seen` as zeros, into block.keys.
template <class Terms, class Block>
inline void load_keys(const mlspec_attention_args& args, int64_t chunk, SlotRange seen, SlotRange steps, Block& block) {
  for (int64_t slot = steps.begin; slot < steps.end; slot += kLanes) {
    block.rows.find(args, args.keys, chunk + slot, seen);
    block.rows.prefetch(args, args.values, chunk + slot);
    Terms::load_keys(args, block.rows.row, block.padded, block.keys + slot * Terms::kPair, kChunk);
  }
}

// The same of values into block.values; -> whether all of them are finite, where that is asked.
template <class Terms, bool kAsk, class Block>
inline bool load_values(const mlspec_attention_args& args, int64_t chunk, SlotRange seen, SlotRange steps, Block& block) {
  Vec products = Vec::zero();  // of values and zero: NaN where one is not finite
  for (int64_t slot = steps.begin; slot < steps.end; slot += kLanes) {
    block.rows.find(args, args.values, chunk + slot, seen);
    block.rows.prefetch(args, args.keys, chunk + kChunk + slot);
    products = Terms::template load_values<kAsk>(args, block.rows.row, block.padded, block.values + slot * block.padded, products);
  }
  return !kAsk || bits(is_nan(products)) == 0;
}
