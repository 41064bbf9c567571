// How is a row of float32 activations packed for a linear? One algorithm and the same bits for every instruction set.
//
// Included by each pack_rows_<isa>.cpp inside its anonymous namespace, after `Vec` and `MLSPEC_TARGET`. Vec has:
//   kLanes (L)                            8 or 16
//   round_bfloat16(x, out)                2 L floats to bfloat16, nearest even
//   magnitude(x) -> Int                   L floats with the sign bit cleared, as int32
//   scaled(x, inverse) -> Int             L floats times inverse, to nearest even int32 (bad ones have a zero low byte)
//   max(a, b), add(a, b), store_codes(Int, int8_t*), store(Int, int32_t*)
//   within(a, bound)                      L integers, those beyond -bound .. bound moved to the end
//   reduce_max(const Int[L]) -> Int, reduce_add: lane i is the reduction of vector i
//   kTransposes, and if so: tile_block(x, stride, rows, first_row, last_row, tile)
// Every operation is an IEEE one on single elements, or on integers where order cannot matter: hence the same bits.

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr uint32_t kInfinityBits = 0x7F800000u, kNanBits = 0x7FC00000u;

inline uint16_t to_bfloat16(float value) {  // a NaN keeps its upper bits and becomes quiet
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > kInfinityBits) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// The sum is in double so that no compiler may fuse it with the float product, whose rounding belongs to the format.
inline int32_t round_to_int(float value) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: the unit of its last place is one
  const double shifted = static_cast<double>(value) + kMagic;
  int64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return static_cast<int32_t>(bits);
}

// Codes are -limit .. limit; the largest magnitude that they mean is clip times that of the group.
struct Range {
  float limit, clip;
};

struct Scale {
  float scale, inverse;
};

// A group of zeros, and one so small that limit / reach overflows (below 4e-37), has scale and codes 0; a NaN or an
// infinity gives scale NaN and codes 0.
inline Scale scale_of(uint32_t largest_bits, Range range) {
  const float reach = bits_float(largest_bits) * range.clip, inverse = range.limit / reach;
  const bool finite = largest_bits < kInfinityBits, usable = finite && float_bits(inverse) < kInfinityBits;
  const float scale = usable ? reach / range.limit : 0.0f;
  return {finite ? scale : bits_float(kNanBits), usable ? inverse : 0.0f};
}

inline void quantize_short_group(const float* x, int64_t n, Range range, int8_t* codes, float* scale, int32_t* sum) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, float_bits(x[i]) & 0x7FFFFFFFu);
  const Scale s = scale_of(largest, range);
  const int32_t bound = static_cast<int32_t>(range.limit);
  int32_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t code = s.inverse != 0.0f ? std::clamp(round_to_int(x[i] * s.inverse), -bound, bound) : 0;
    codes[i] = static_cast<int8_t>(code);
    total += code;
  }
  *scale = s.scale;
  *sum = total;
}

// Up to kLanes whole groups: partial maxima of each, reduced together, so that a division serves kLanes groups.
// kClips: codes may be beyond the limit.
template <int kGroup, bool kClips>
void quantize_groups(const float* x, int64_t count, Range range, int8_t* codes, float* scales, int32_t* sums) {
  constexpr int kLanes = Vec::kLanes;
  typename Vec::Int partial[kLanes] = {};
  for (int64_t g = 0; g < count; ++g) {
    partial[g] = Vec::magnitude(x + g * kGroup);
    for (int i = kLanes; i < kGroup; i += kLanes)
      partial[g] = Vec::max(partial[g], Vec::magnitude(x + g * kGroup + i));
  }
  alignas(64) int32_t largest[kLanes], totals[kLanes];
  alignas(64) float scale[kLanes], inverse[kLanes];
  Vec::store(Vec::reduce_max(partial), largest);
  for (int g = 0; g < kLanes; ++g) {
    const Scale s = scale_of(static_cast<uint32_t>(largest[g]), range);
    scale[g] = s.scale;
    inverse[g] = s.inverse;
  }
  for (int64_t g = 0; g < count; ++g) {
    typename Vec::Int sum = {};
    const int32_t bound = inverse[g] != 0.0f ? static_cast<int32_t>(range.limit) : 0;
    for (int i = 0; i < kGroup; i += kLanes) {
      typename Vec::Int code = Vec::scaled(x + g * kGroup + i, inverse[g]);
      if constexpr (kClips) code = Vec::within(code, bound);
      Vec::store_codes(code, codes + g * kGroup + i);
      sum = Vec::add(sum, code);
    }
    partial[g] = sum;
  }
  Vec::store(Vec::reduce_add(partial), totals);
  for (int64_t g = 0; g < count; ++g) {
    scales[g] = scale[g];
    sums[g] = inverse[g] != 0.0f ? totals[g] : 0;
  }
}

template <int kGroup>
void quantize_run(const float* x, int64_t n, Range range, int8_t* codes, float* scales, int32_t* sums) {
  const int64_t whole = n / kGroup;
  for (int64_t g = 0; g < whole; g += Vec::kLanes) {
    const int64_t count = std::min<int64_t>(Vec::kLanes, whole - g);
    const auto quantize = range.clip == 1.0f ? quantize_groups<kGroup, false> : quantize_groups<kGroup, true>;
    quantize(x + g * kGroup, count, range, codes + g * kGroup, scales + g, sums + g);
  }
  const int64_t done = whole * kGroup;
  if (done < n) quantize_short_group(x + done, n - done, range, codes + done, scales + whole, sums + whole);
}

inline void round_run(const float* x, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + 2 * Vec::kLanes <= n; i += 2 * Vec::kLanes) Vec::round_bfloat16(x + i, out + i);
  for (; i < n; ++i) out[i] = to_bfloat16(x[i]);
}

// Rows [first, last) of one tile [16 pairs][16 rows][2]; rows from `rows` on, and elements from `n` on, become zero.
// Touches no other row's words: another thread may be packing them.
inline void tile_block(const float* x, int64_t stride, int64_t rows, int64_t n, int64_t first, int64_t last,
                       uint16_t* tile) {
  for (int64_t r = first; r < last; ++r) {
    uint16_t row[32] = {};
    if (r < rows) round_run(x + r * stride, n, row);
    for (int pair = 0; pair < 16; ++pair) std::memcpy(tile + pair * 32 + r * 2, row + 2 * pair, 4);
  }
}

template <class V>
void pack_tiles(const mlspec_pack_args& a, int64_t row_begin, int64_t row_end, int64_t k_begin, int64_t k_end) {
  const int64_t n = a.acts->num_rows, blocks = (a.acts->in_features + 31) / 32;
  // The call that packs the last row zeroes the rows that pad its tile, in its own range of k.
  const int64_t padded_end = row_end == n ? (n + 15) / 16 * 16 : row_end;
  for (int64_t t = row_begin / 16; t * 16 < padded_end && row_begin < row_end; ++t) {
    const int64_t first = std::max<int64_t>(row_begin - t * 16, 0), last = std::min<int64_t>(padded_end - t * 16, 16);
    const int64_t rows = std::min<int64_t>(n - t * 16, 16);
    const float* x = a.x + t * 16 * a.x_stride;
    uint16_t* tiles = static_cast<uint16_t*>(a.acts->data) + t * blocks * 512;
    int64_t k = k_begin;
    if constexpr (V::kTransposes) {
      for (; k + 32 <= k_end; k += 32) V::tile_block(x + k, a.x_stride, rows, first, last, tiles + k / 32 * 512);
    }
    for (; k < k_end; k += 32)
      tile_block(x + k, a.x_stride, rows, std::min<int64_t>(32, k_end - k), first, last, tiles + k / 32 * 512);
  }
}

inline void pack_codes(const mlspec_acts& acts, const float* x, int64_t row, int64_t k_begin, int64_t k_end) {
  const int64_t wide_begin = acts.in_features - acts.wide;
  if (k_begin < wide_begin && wide_begin < k_end) {
    pack_codes(acts, x, row, k_begin, wide_begin);
    return pack_codes(acts, x + wide_begin - k_begin, row, wide_begin, k_end);
  }
  const int64_t at = row * mlspec_groups(&acts) + k_begin / acts.group, n = k_end - k_begin;
  const Range range = acts.bits == 4 && k_begin < wide_begin ? Range{7.0f, acts.clip} : Range{127.0f, 1.0f};
  int8_t* codes = mlspec_acts_codes(&acts) + row * acts.in_features + k_begin;
  float* scales = mlspec_acts_scales(&acts) + at;
  int32_t* sums = mlspec_acts_sums(&acts) + at;
  switch (acts.group) {
    case 32: return quantize_run<32>(x, n, range, codes, scales, sums);
    case 64: return quantize_run<64>(x, n, range, codes, scales, sums);
    default: return quantize_run<128>(x, n, range, codes, scales, sums);
  }
}

void pack_rows(const mlspec_pack_args& a, int64_t row_begin, int64_t row_end, int64_t k_begin, int64_t k_end) {
  const mlspec_acts& acts = *a.acts;
  if (acts.kind == MLSPEC_ACTS_BF16_TILES) return pack_tiles<Vec>(a, row_begin, row_end, k_begin, k_end);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = a.x + row * a.x_stride + k_begin;
    const int64_t at = row * acts.in_features + k_begin, n = k_end - k_begin;
    if (acts.kind == MLSPEC_ACTS_INT) {
      pack_codes(acts, x, row, k_begin, k_end);
    } else if (acts.kind == MLSPEC_ACTS_BF16) {
      round_run(x, n, static_cast<uint16_t*>(acts.data) + at);
    } else {
      std::memcpy(static_cast<float*>(acts.data) + at, x, n * sizeof(float));
    }
  }
}

#define MLSPEC_PACK_ROWS(isa)                                                                                              \
  extern "C" void mlspec_pack_rows_##isa(const mlspec_pack_args* args, int64_t row_begin, int64_t row_end, int64_t k_begin, \
                                         int64_t k_end) {                                                                   \
    pack_rows(*args, row_begin, row_end, k_begin, k_end);                                                                   \
  }
