// How are the slots of a chunk read out of the cache? Whole rows of elements, codes widened, zeros where nobody may look.
//
// Included inside the anonymous namespaces of attention_<isa>.cpp, after Vec.

#include "../rows/row_ops_words.h"

constexpr int kChunk = 64;  // slots between two updates of the running maximum; a draft window leaves the first ones in view
constexpr int kStep = 32;   // elements of a head, and slots of a chunk, that are multiplied at a time

struct SlotRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
  SlotRange within(int64_t low, int64_t high) const { return {std::max(begin, low), std::min(end, high)}; }
};

// How a row of codes becomes Terms' elements (hf_mlspec/formats/cache/). kPerByte: codes in a byte. widen: kStep of them.
template <class Terms>
struct Int8Row {
  static constexpr mlspec_dtype kDtype = MLSPEC_INT8_ROWS;
  static constexpr int kPerByte = 1;
  Vec scale;

  explicit Int8Row(const char* tail) {
    float stored;
    std::memcpy(&stored, tail, sizeof stored);
    scale = Vec::all(stored);
  }
  void widen(const char* from, char* to) const {
    const auto* const codes = reinterpret_cast<const int8_t*>(from);
    Terms::store_widened(Vec::load_int8(codes) * scale, Vec::load_int8(codes + kLanes) * scale, to);
  }
};

template <class Terms>
struct Int4Row {
  static constexpr mlspec_dtype kDtype = MLSPEC_INT4_ROWS;
  static constexpr int kPerByte = 2;
  typename Terms::Table values;  // of the 16 codes

  explicit Int4Row(const char* tail) {
    alignas(64) static const float kCodes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint16_t ends[2];
    std::memcpy(ends, tail, sizeof ends);
    const Vec code = Vec::load(kCodes), all = Vec::all(15.f);
    const Vec low = Vec::all(float_of(uint32_t(ends[0]) << 16)), high = Vec::all(float_of(uint32_t(ends[1]) << 16));
    values = Terms::table(fma(high, code, low * (all - code)) / all);  // exact products: fused or not, the sum is the same
  }
  void widen(const char* from, char* to) const {
    Terms::store_looked_up(values, reinterpret_cast<const uint8_t*>(from), to);
  }
};

// Where 16 slots' rows of whole steps lie: in the cache, or here where somebody may not look, or a step is not whole.
struct CacheRows {
  const char* first;
  int64_t stride;  // bytes from row to row
  int64_t end;     // behind the last slot that the block reads
  alignas(64) char padded[kLanes][kMaxHeadDim * sizeof(float) + 64];

  // Whether rows of slots [begin, end) are taken from where they lie.
  static bool in_cache(const mlspec_attention_args& args, int64_t begin, int64_t end, SlotRange seen) {
    const bool codes = args.kv_dtype == MLSPEC_INT8_ROWS || args.kv_dtype == MLSPEC_INT4_ROWS;
    return !codes && args.head_dim % kStep == 0 && seen.begin <= begin && end <= seen.end;
  }

  // Of slots [slot, slot + 16) of lanes[slots][head_dim]; rows of zeros outside `seen`. Rows of codes become Terms' elements.
  template <class Terms>
  void find(const mlspec_attention_args& args, const void* lanes, int64_t slot, SlotRange seen) {
    stride = row_stride(args);
    first = static_cast<const char*>(lanes) + slot * stride;
    if (args.kv_dtype == MLSPEC_INT8_ROWS) return widen<Terms, Int8Row<Terms>>(args.head_dim, slot, seen);
    if (args.kv_dtype == MLSPEC_INT4_ROWS) return widen<Terms, Int4Row<Terms>>(args.head_dim, slot, seen);
    if (in_cache(args, slot, slot + kLanes, seen)) return;
    const int64_t bytes = mlspec_cache_row_bytes(args.kv_dtype, args.head_dim);
    for (int s = 0; s < kLanes; ++s) {
      const bool visible = seen.begin <= slot + s && slot + s < seen.end;
      if (visible) std::memcpy(padded[s], first + s * stride, bytes);
      const int64_t filled = visible ? bytes : 0, step = bytes / args.head_dim * kStep;
      std::memset(padded[s] + filled, 0, (bytes + step - 1) / step * step - filled);
    }
    first = padded[0];
    stride = sizeof padded[0];
  }

  // The 16 rows of codes at `first` as elements, whole steps, zeros behind the last and outside `seen`.
  template <class Terms, class Row>
  void widen(int64_t head_dim, int64_t slot, SlotRange seen) {
    using Element = typename Terms::Element;
    const int64_t steps = (head_dim + kStep - 1) / kStep * kStep, whole = head_dim / kStep * kStep;
    const int64_t codes = head_dim / Row::kPerByte;
    const int64_t to_stride = steps * static_cast<int64_t>(sizeof(Element)) + 64;  // rows fall into different sets of the L1 cache
    for (int s = 0; s < kLanes; ++s) {
      char* const to = padded[0] + s * to_stride;
      if (slot + s < seen.begin || slot + s >= seen.end) {
        std::memset(to, 0, steps * sizeof(Element));
        continue;
      }
      const char* const from = first + s * stride;
      const Row row(from + codes);
      for (int64_t d = 0; d < whole; d += kStep) row.widen(from + d / Row::kPerByte, to + d * sizeof(Element));
      if (whole == steps) continue;
      char rest[kStep] = {};
      std::memcpy(rest, from + whole / Row::kPerByte, codes - whole / Row::kPerByte);
      row.widen(rest, to + whole * sizeof(Element));
      std::memset(to + head_dim * sizeof(Element), 0, (steps - head_dim) * sizeof(Element));  // zero times NaN is NaN
    }
    first = padded[0];
    stride = to_stride;
  }

  // Slots [slot, until) that are read next, into the L2 cache: lines on their way into the first one hold its few buffers up.
  // Rows side by side are no stream that processors follow by themselves.
  void prefetch(const mlspec_attention_args& args, const void* lanes, int64_t slot, int64_t until) const {
    const int64_t bytes = row_stride(args), stop = std::min(until, end) * bytes;
    for (int64_t b = slot * bytes; b < stop; b += 64) __builtin_prefetch(static_cast<const char*>(lanes) + b, 0, 2);
  }

  static int64_t row_stride(const mlspec_attention_args& args) {
    return args.cache_stride ? args.cache_stride : mlspec_cache_row_bytes(args.kv_dtype, args.head_dim);
  }
};

// Slots `steps` of the chunk into block.keys; the scores of those outside `seen` are never looked at.
template <class Terms, class Block>
inline void load_keys(const mlspec_attention_args& args, int64_t chunk, SlotRange seen, SlotRange steps, Block& block) {
  for (int64_t slot = steps.begin; slot < steps.end; slot += kLanes) {
    if (seen.within(chunk + slot, chunk + slot + kLanes).empty()) continue;
    block.rows.template find<Terms>(args, args.keys, chunk + slot, seen);
    block.rows.prefetch(args, args.values, chunk + slot, chunk + slot + kLanes);
    Terms::load_keys(args, block.rows, block.padded, block.keys + slot * Terms::kPair, kChunk);
  }
}

// The same of values into block.values; -> whether all of them are finite, where that is asked.
template <class Terms, bool kAsk, class Block>
inline bool load_values(const mlspec_attention_args& args, int64_t chunk, SlotRange seen, SlotRange steps, Block& block) {
  Vec products = Vec::zero();  // of values and zero: NaN where one is not finite
  for (int64_t slot = steps.begin; slot < steps.end; slot += kLanes) {
    block.rows.template find<Terms>(args, args.values, chunk + slot, seen);
    const int64_t next = block.next_chunk + slot;
    if (!block.spreads()) block.rows.prefetch(args, args.keys, next, next + kLanes);
    products = Terms::template load_values<kAsk>(args, block.rows, block.padded, block.values + slot * block.padded, products);
  }
  return !kAsk || bits(is_nan(products)) == 0;
}
