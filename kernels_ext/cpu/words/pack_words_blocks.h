// How do words of 4-bit codes that run along the outputs become rows that run along the inputs? The code that all instruction
// sets share: included in an anonymous namespace behind a `Vec` of kLanes words, one an output.
//
// A square of kLanes x kLanes words is built in registers, a vector for every word of a row, and transposed there: each byte of
// a file is read once and each byte of the result written once. Where the nibbles of a word are not eight inputs of one output,
// they are put so first: gathered one by one in another order (GPTQ), or exchanged between eight words (AWQ; Warren, Hacker's
// Delight, section 7-3).

constexpr int kEight = 8;                            // nibbles of a word
constexpr int64_t kWide = MLSPEC_WORDS_ROOM / kLanes;  // squares side by side: what is read are whole lines of the cache
static_assert(MLSPEC_WORDS_GPTQ_OUTPUTS % MLSPEC_WORDS_ROOM == 0 && MLSPEC_WORDS_AWQ_COLUMNS == MLSPEC_WORDS_ROOM, "whole steps");

inline int64_t at_most(int64_t count, int64_t limit) { return count < limit ? count : limit; }

// words[r * stride + lane]: word r of the rows of so many outputs -> the outputs' rows, each `row_words` words long.
inline void write_square(const uint32_t* words, int64_t stride, int64_t rows, int64_t lanes, uint32_t* out, int64_t out_stride) {
  Vec square[kLanes];
  for (int r = 0; r < kLanes; ++r) square[r] = r < rows ? Vec::load(words + r * stride, lanes) : Vec::zero();
  Vec::transpose(square);
  for (int64_t lane = 0; lane < lanes; ++lane) square[lane].store(out + lane * out_stride, rows);
}

// Columns [o, o + width) of all rows of a file side by side, zeros behind them: rows of a file may lie at multiples of a power of
// two, and no cache holds many such lines.
inline void stage(const mlspec_words_args& args, int64_t count, int64_t o, int64_t width) {
  for (int64_t e = 0; e < count; ++e)
    for (int64_t s = 0; s < kWide; ++s) {
      const int64_t lanes = at_most(width - s * kLanes, kLanes);
      const Vec seen = lanes > 0 ? Vec::load(args.words + e * args.out_features + o + s * kLanes, lanes) : Vec::zero();
      seen.store(args.room + e * MLSPEC_WORDS_ROOM + s * kLanes, kLanes);
    }
}

// A word of the rows of the staged outputs: inputs order[0 .. 7] of each, to words[s * kLanes * kLanes + lane].
inline void gather_word(const uint32_t* room, const int64_t* order, uint32_t* words) {
  Vec found[kWide];
  for (Vec& one : found) one = Vec::zero();
  for (int place = 0; place < kEight; ++place) {
    const uint64_t input = static_cast<uint64_t>(order[place]);
    const int from = static_cast<int>(input % kEight);
    const int left = from < place ? 4 * (place - from) : 0, right = from > place ? 4 * (from - place) : 0;
    const uint32_t* const row = room + input / kEight * MLSPEC_WORDS_ROOM;
    for (int64_t s = 0; s < kWide; ++s)
      found[s] = found[s].with(Vec::load(row + s * kLanes, kLanes).shifted(left, right), 0xFu << (4 * place));
  }
  for (int64_t s = 0; s < kWide; ++s) found[s].store(words + s * kLanes * kLanes, kLanes);
}

inline void pack_gptq(const mlspec_words_args& args, int64_t begin, int64_t end) {
  const int64_t count = args.in_features / kEight, outputs = args.out_features;
  const int64_t last = at_most(end * MLSPEC_WORDS_GPTQ_OUTPUTS, outputs);
  alignas(64) uint32_t gathered[kWide * kLanes * kLanes];
  for (int64_t o = begin * MLSPEC_WORDS_GPTQ_OUTPUTS; o < last; o += MLSPEC_WORDS_ROOM) {
    const int64_t width = at_most(last - o, MLSPEC_WORDS_ROOM);
    if (args.order) stage(args, count, o, width);
    for (int64_t e = 0; e < count; e += kLanes) {
      const int64_t rows = at_most(count - e, kLanes);
      if (args.order)
        for (int64_t r = 0; r < rows; ++r) gather_word(args.room, args.order + (e + r) * kEight, gathered + r * kLanes);
      const uint32_t* const from = args.order ? gathered : args.words + e * outputs + o;
      const int64_t stride = args.order ? kLanes : outputs, apart = args.order ? kLanes * kLanes : kLanes;
      for (int64_t s = 0; s * kLanes < width; ++s)
        write_square(from + s * apart, stride, rows, at_most(width - s * kLanes, kLanes),
                     args.rows + (o + s * kLanes) * count + e, count);
    }
  }
}

// The upper fields of `low` and the lower ones of `high`, of so many bits each, change places.
template <int kBits>
inline void exchange(Vec& low, Vec& high, uint32_t fields) {
  const Vec moved = (low.shifted(0, kBits) ^ high) & fields;
  high = high ^ moved;
  low = low ^ moved.shifted(kBits, 0);
}

// Nibble i of word k and nibble k of word i change places.
inline void transpose_nibbles(Vec (&w)[kEight]) {
  for (int i = 0; i < kEight; i += 2) exchange<4>(w[i], w[i + 1], 0x0F0F0F0Fu);
  for (int i = 0; i < kEight; ++i)
    if (!(i & 2)) exchange<8>(w[i], w[i + 2], 0x00FF00FFu);
  for (int i = 0; i < 4; ++i) exchange<16>(w[i], w[i + 4], 0x0000FFFFu);
}

// Eight words r of the rows of so many outputs times eight, from eight rows of a file, to words[i * kLanes * kLanes + lane].
inline void transpose_word(const uint32_t* from, int64_t stride, int64_t lanes, uint32_t* words) {
  Vec eight[kEight];
  for (int i = 0; i < kEight; ++i) eight[i] = Vec::load(from + i * stride, lanes);
  transpose_nibbles(eight);
  for (int i = 0; i < kEight; ++i) eight[i].store(words + i * kLanes * kLanes, kLanes);
}

inline void pack_awq(const mlspec_words_args& args, int64_t begin, int64_t end) {
  constexpr int kColumns[kEight] = {0, 2, 4, 6, 1, 3, 5, 7};  // of the nibbles of a word
  constexpr int64_t kSquares = kEight * kLanes * kLanes;
  const int64_t count = args.in_features / kEight, width = args.out_features / kEight;
  const int64_t last = at_most(end * MLSPEC_WORDS_AWQ_COLUMNS, width);
  alignas(64) uint32_t words[kWide * kSquares];
  for (int64_t c = begin * MLSPEC_WORDS_AWQ_COLUMNS; c < last; c += MLSPEC_WORDS_AWQ_COLUMNS) {
    const int64_t columns = at_most(last - c, MLSPEC_WORDS_AWQ_COLUMNS);
    for (int64_t e = 0; e < count; e += kLanes) {
      const int64_t rows = at_most(count - e, kLanes);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t s = 0; s * kLanes < columns; ++s)
          transpose_word(args.words + (e + r) * kEight * width + c + s * kLanes, width, at_most(columns - s * kLanes, kLanes),
                         words + s * kSquares + r * kLanes);
      for (int64_t s = 0; s * kLanes < columns; ++s)
        for (int i = 0; i < kEight; ++i)
          write_square(words + s * kSquares + i * kLanes * kLanes, kLanes, rows, at_most(columns - s * kLanes, kLanes),
                       args.rows + ((c + s * kLanes) * kEight + kColumns[i]) * count + e, kEight * count);
    }
  }
}

#define MLSPEC_PACK_WORDS(isa)                                                                                        \
  extern "C" void mlspec_pack_gptq_##isa(const mlspec_words_args* args, int64_t begin, int64_t end) { \
    pack_gptq(*args, begin, end);                                                                                     \
  }                                                                                                                   \
  extern "C" void mlspec_pack_awq_##isa(const mlspec_words_args* args, int64_t begin, int64_t end) {  \
    pack_awq(*args, begin, end);                                                                                      \
  }
