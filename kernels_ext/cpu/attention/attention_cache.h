// How are the slots of a chunk read out of the cache? Whole rows of elements, zeros where nobody may look.
//
// Included inside the anonymous namespaces of attention_<isa>.cpp, after Vec.

constexpr int kChunk = 64;  // slots between two updates of the running maximum; a draft window leaves the first ones in view
constexpr int kStep = 32;   // elements of a head, and slots of a chunk, that are multiplied at a time

struct SlotRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  SlotRange within(int64_t low, int64_t high) const { return {std::max(begin, low), std::min(end, high)}; }
};

// Where 16 slots' rows of whole steps lie: in the cache, or here where somebody may not look, or a step is not whole.
struct CacheRows {
  const char* first;
  int64_t stride;  // bytes from row to row
  int64_t end;     // behind the last slot that the block reads
  alignas(64) char padded[kLanes][kMaxHeadDim * sizeof(float)];

  // Of slots [slot, slot + 16) of lanes[slots][head_dim]; rows of zeros outside `seen`.
  void find(const mlspec_attention_args& args, const void* lanes, int64_t slot, SlotRange seen) {
    const int64_t bytes = row_bytes(args);
    first = static_cast<const char*>(lanes) + slot * bytes;
    stride = bytes;
    const bool whole = seen.begin <= slot && slot + kLanes <= seen.end;
    if (whole && args.head_dim % kStep == 0) return;
    for (int s = 0; s < kLanes; ++s) {
      const bool visible = seen.begin <= slot + s && slot + s < seen.end;
      if (visible) std::memcpy(padded[s], first + s * bytes, bytes);
      const int64_t filled = visible ? bytes : 0, step = bytes / args.head_dim * kStep;
      std::memset(padded[s] + filled, 0, (bytes + step - 1) / step * step - filled);
    }
    first = padded[0];
    stride = sizeof padded[0];
  }

  // Slots [slot, until) that are read next: rows side by side are no stream that processors follow by themselves.
  void prefetch(const mlspec_attention_args& args, const void* lanes, int64_t slot, int64_t until) const {
    const int64_t bytes = row_bytes(args), stop = std::min(until, end) * bytes;
    for (int64_t b = slot * bytes; b < stop; b += 64) __builtin_prefetch(static_cast<const char*>(lanes) + b);
  }

  static int64_t row_bytes(const mlspec_attention_args& args) {
    return args.head_dim * (args.kv_dtype == MLSPEC_FLOAT32 ? 4 : 2);
  }
};

// Slots `steps` of the chunk into block.keys; the scores of those outside `seen` are never looked at.
template <class Terms, class Block>
inline void load_keys(const mlspec_attention_args& args, int64_t chunk, SlotRange seen, SlotRange steps, Block& block) {
  for (int64_t slot = steps.begin; slot < steps.end; slot += kLanes) {
    if (seen.within(chunk + slot, chunk + slot + kLanes).empty()) continue;
    block.rows.find(args, args.keys, chunk + slot, seen);
    block.rows.prefetch(args, args.values, chunk + slot, chunk + slot + kLanes);
    Terms::load_keys(args, block.rows, block.padded, block.keys + slot * Terms::kPair, kChunk);
  }
}

// The same of values into block.values; -> whether all of them are finite, where that is asked.
template <class Terms, bool kAsk, class Block>
inline bool load_values(const mlspec_attention_args& args, int64_t chunk, SlotRange seen, SlotRange steps, Block& block) {
  Vec products = Vec::zero();  // of values and zero: NaN where one is not finite
  for (int64_t slot = steps.begin; slot < steps.end; slot += kLanes) {
    block.rows.find(args, args.values, chunk + slot, seen);
    const int64_t next = block.next_chunk + slot;
    if (!block.spreads()) block.rows.prefetch(args, args.keys, next, next + kLanes);
    products = Terms::template load_values<kAsk>(args, block.rows, block.padded, block.values + slot * block.padded, products);
  }
  return !kAsk || bits(is_nan(products)) == 0;
}
