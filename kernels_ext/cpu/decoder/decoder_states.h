// What do recurrent layers keep of the rows of a batch, and to which lengths can it be taken back?
#pragma once
#include <algorithm>
#include <cstdint>

namespace mlspec {

// Of each row a few states, each of the row's first so many tokens, and the inputs of its last tokens: a state of any length in
// between is made by running those behind a shorter one again. All layers have states of the same lengths. The shortest state of a
// row is that before its first token, zeros, which nobody stores.
struct RecurrentStates {
  float* states = nullptr;   // [layers][batch][kept][state_size]
  float* inputs = nullptr;   // [layers][batch][window][width]: of token p in place p % window
  int64_t* marks = nullptr;  // [batch][kept + 2]: tokens of every state, -1: none; then [first, end) of the tokens whose inputs are there
  int64_t layers = 0, batch = 0, kept = 0, window = 0, state_size = 0, width = 0, before = 0;  // before: inputs that a token reads beside its own

  static constexpr int64_t kZeros = -1;  // in place of a state's number

  explicit operator bool() const { return layers > 0; }
  int64_t* lengths(int64_t row) const { return marks + row * (kept + 2); }
  int64_t& first(int64_t row) const { return lengths(row)[kept]; }
  int64_t& end(int64_t row) const { return lengths(row)[kept + 1]; }
  float* state(int64_t layer, int64_t row, int64_t number) const {
    return states + ((layer * batch + row) * kept + number) * state_size;
  }
  float* input(int64_t layer, int64_t row, int64_t token) const {
    return inputs + ((layer * batch + row) * window + token % window) * width;
  }
  int64_t length(int64_t row, int64_t number) const { return number == kZeros ? 0 : lengths(row)[number]; }

  // The longest state of `row` of at most `wanted` tokens from which a state of `wanted` can be made; its number, or kZeros. found: of how
  // many tokens a state can be made, at most `wanted`.
  int64_t nearest(int64_t row, int64_t wanted, int64_t& found) const {
    int64_t best = kZeros;
    found = 0;
    for (int64_t number = kZeros; number < kept; ++number) {
      const int64_t have = length(row, number);
      if (have < 0 || have > wanted || first(row) > std::max<int64_t>(have - before, 0) || have > end(row)) continue;
      const int64_t most = std::min(wanted, end(row));
      if (most > found || (most == found && have > length(row, best))) found = most, best = number;
    }
    return best;
  }
  // Where the next state of `row` goes: never in place of `number`.
  int64_t place(int64_t row, int64_t number) const {
    int64_t found = number == 0 ? 1 : 0;
    for (int64_t other = 0; other < kept; ++other)
      if (other != number && lengths(row)[other] < lengths(row)[found]) found = other;
    return found;
  }
  void forget(int64_t row) const {
    std::fill_n(lengths(row), kept, -1);
    first(row) = end(row) = 0;
  }
  // Tokens from `length` on are no more: others take their places.
  void cut(int64_t row, int64_t length) const {
    for (int64_t number = 0; number < kept; ++number)
      if (lengths(row)[number] > length) lengths(row)[number] = -1;
    end(row) = std::min(end(row), length);
  }
};

// A state of a row that is made again: inputs [begin, end) of `source` run behind its state `from`. Mostly source and states are one.
struct Replay {
  RecurrentStates source, states;
  int64_t row, begin, end, from, to;
};

// The state of a row begins as another owner's, of `length` tokens; from: kZeros where a replay has made it already.
struct Fork {
  RecurrentStates source, states;
  int64_t row, length, from, to;
};

// Tokens of a pass, consecutive ones of a row, that run behind state `from` and leave state `to`.
struct Run {
  int64_t row, start, first, count, from, to;
};

}  // namespace mlspec
