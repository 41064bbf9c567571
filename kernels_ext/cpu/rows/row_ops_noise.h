// Which token has the largest score + noise? Plain loops over arrays, which every instruction set makes vectors of.
//
// Included inside the anonymous namespace of row_ops_<isa>.cpp, after row_ops_loops.h. Logarithms are taken only of noise that may
// win. Philox4x32-10: Salmon, Moraes, Dror and Shaw, SC 2011; hf_mlspec/ops/choose.py is the reference.

#include "row_ops_words.h"

constexpr int kBlocks = 32, kPiece = 4 * kBlocks;  // of one piece: blocks of four words, a word a token

struct Words {
  alignas(64) uint32_t of[4][kBlocks];
};

inline void philox_round(uint32_t (&x)[4], uint32_t low_key, uint32_t high_key) {
  const uint64_t of_a = uint64_t(x[0]) * 0xD2511F53u, of_c = uint64_t(x[2]) * 0xCD9E8D57u;
  x[0] = uint32_t(of_c >> 32) ^ x[1] ^ low_key;
  x[1] = uint32_t(of_c);
  x[2] = uint32_t(of_a >> 32) ^ x[3] ^ high_key;
  x[3] = uint32_t(of_a);
}

template <uint32_t... round>
inline void philox(const mlspec_noise& at, uint32_t first_block, Words& words, std::integer_sequence<uint32_t, round...>) {
  const uint32_t low = uint32_t(at.seed), high = uint32_t(at.seed >> 32), position = at.position, stream = at.stream;
  for (int i = 0; i < kBlocks; ++i) {
    uint32_t x[4] = {first_block + uint32_t(i), position, stream, 0};
    (philox_round(x, low + round * 0x9E3779B9u, high + round * 0xBB67AE85u), ...);
    for (int k = 0; k < 4; ++k) words.of[k][i] = x[k];
  }
}

// log(x + rest) of a normal x > 0; rest, below half a unit of x, counts only where x is within a factor of sqrt 2 of 1.
inline float log_of(float x, float rest) {
  const uint32_t shifted = bits_of(x) - 0x3F3504F3u;  // sqrt(1/2): x = m * 2^e with m in [sqrt(1/2), sqrt(2))
  const int32_t e = int32_t(shifted) >> 23;
  const float m = float_of((shifted & 0x007FFFFFu) + 0x3F3504F3u);
  const float n = float(e), near_one = float_of(bits_of(rest) & uint32_t(-int32_t(e == 0)));
  const float f = (m - 1.f) + near_one, square = f * f;
  float p = 7.0376836292e-2f;  // Cephes, logf
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  float y = f * square * p;
  y += -2.12194440e-4f * n;  // ln 2 in two parts
  y -= 0.5f * square;
  return f + y + 0.693359375f * n;
}

// What all four words of every block stand for, in the order of the tokens: uniform numbers above 0 and below 1.
inline void uniforms(const Words& words, float* v) {
  for (int i = 0; i < kBlocks; ++i)
    for (int k = 0; k < 4; ++k) {
      const uint32_t word = words.of[k][i];
      const float wide = float(int32_t(word >> 16)) * 65536.f + float(int32_t(word & 0xFFFFu));  // rounds once
      const uint32_t found = bits_of((wide + 0.5f) * 0x1p-32f);  // positive floats have the order of their words
      v[4 * i + k] = float_of(found < 0x3F7FFFFFu ? found : 0x3F7FFFFFu);
    }
}

// Near 0, where float32 is fine, lie the largest noises.
inline float gumbel(float v) {
  const float left = 1.f - v;
  return -log_of(-log_of(left, (1.f - left) - v), 0.f);
}

// No less than gumbel(v), which is below -log(v); the word of a float is a chord of its logarithm to base 2, so below it.
inline void bounds(const float* v, float* most) {
  constexpr float kLog2 = 0.693147181f, kRounding = 1e-3f;
  for (int i = 0; i < kPiece; ++i) most[i] = float(int32_t(bits_of(v[i]))) * (-kLog2 * 0x1p-23f) + (127.f * kLog2 + kRounding);
}

constexpr float kLargestNoise = 22.9f;  // of word 0: 33 log 2 = 22.87

// The first token of the largest sum; scores without NaN, 0 where all are -inf.
int64_t draw(const mlspec_noise* at, const float* scores, int64_t n) {
  Words words;
  alignas(64) float v[kPiece], most[kPiece], noise[kLanes];
  float best = -INFINITY;
  int64_t winner = 0;
  for (int64_t first = 0; first < n; first += kPiece) {
    const int64_t count = std::min<int64_t>(kPiece, n - first);
    if (largest_of(scores + first, count) + kLargestNoise <= best) continue;
    philox(*at, uint32_t(first / 4), words, std::make_integer_sequence<uint32_t, 10>());
    uniforms(words, v);
    bounds(v, most);
    for_each_vec(count, [&](int64_t i, auto lanes) {
      if (!bits(less(Vec::all(best), load(scores + first + i, lanes) + Vec::load(most + i)))) return;
      for (int lane = 0; lane < kLanes; ++lane) noise[lane] = gumbel(v[i + lane]);
      for (int lane = 0; lane < lanes; ++lane) {
        const float sum = scores[first + i + lane] + noise[lane];
        if (sum > best) best = sum, winner = first + i + lane;
      }
    });
  }
  return winner;
}
