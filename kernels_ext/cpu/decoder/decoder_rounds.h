// How do several passes become one call? Scoring long rows, drafting token by token, and rounds of draft and check.
#pragma once
#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "decoder.h"

namespace mlspec {

// Thrown by a call whose pass came to nothing: streamed planes could not be had, or another process that shares the model is gone.
struct PassFailed : std::exception {
  explicit PassFailed(const char* why) : why_(why) {}
  const char* what() const noexcept override { return why_; }

 private:
  const char* why_;
};

// What a decoder knows of every row of the batch. lengths: tokens its cache holds truly. bits, draft_window, tap: as in
// Pass.
struct Level {
  Decoder* decoder = nullptr;
  RaggedKv kv;
  std::vector<int64_t> lengths;
  Bits bits;
  int64_t draft_window = 0;
  RecurrentStates states;  // of layers that keep some; a row's go on from those of lengths[r] tokens
  std::shared_ptr<std::vector<RecurrentStates>> owners;  // where sources point
  std::vector<const RecurrentStates*> sources;  // of rows whose states begin, once, as another owner's; null: their own
  Tap tap;
  int64_t forwards = 0;
  double seconds = 0;
  std::vector<int64_t> widths;  // as in Pass; picked in the one pass of the call where `choose` is given
  ChooseWidth choose = nullptr;
  bool mixes = false;           // as in Pass
};

// Whether `level` has no rows of its own, but those of `leader`: one cache, or, where no layer keeps keys and values, the leader's states to
// begin with.
bool follows(const Level& level, const Level& leader);

// A row from its token number `base` on. nodes: guesses that are a tree behind its end, depth first; depths: of each, 1 of those right
// behind the end, and of every other at most one more than of the node before it.
struct TokenRow {
  int64_t base = 0;
  std::vector<int64_t> tokens;
  std::vector<int64_t> nodes = {}, depths = {};
  int64_t deepest() const { return depths.empty() ? 0 : *std::max_element(depths.begin(), depths.end()); }
  int64_t end() const { return base + static_cast<int64_t>(tokens.size()); }
};

// What follows the last tokens of every row: rows behind each other, offsets[r] .. offsets[r + 1].
struct Scored {
  std::vector<int64_t> offsets, best;  // best: -1 where logits hold NaN
  std::vector<float> confidence;
};

// Feeds every row from lengths[r] to its end, and its tree; scores its last kept[r] positions and all nodes (0: the row rests). Node j has
// its keys and values in slot end + deepest + j, those of the branch that came last are in slots end, end + 1, ... too.
// logits: null, or float [sum of kept][vocab].
Scored score(int threads, Level& level, const std::vector<TokenRow>& rows, const std::vector<int64_t>& kept,
             bool want_confidence, float* logits);

// Up to limits[r] greedy tokens after row r, fewer behind one less probable than `threshold`. Tokens of -1: NaN.
std::vector<std::vector<int64_t>> draft(int threads, Level& level, std::vector<TokenRow> rows,
                                        const std::vector<int64_t>& limits, float threshold);

// The draft of a checked level: `tiny` guesses up to num_draft_tokens tokens, `middle` checks and corrects them, until a row
// has limits[r] tokens or the middle level's threshold ends it. ML-SpecQD, section 3.
struct CheckedDraft {
  std::vector<std::vector<int64_t>> settled;
  std::vector<std::pair<int64_t, int64_t>> inner;  // (drafted, accepted), one pair per row and round
  int64_t rounds = 0;
};
struct CheckedOptions {
  int64_t num_draft_tokens = 8;
  float tiny_threshold = 0, middle_threshold = 0;
};
CheckedDraft draft_checked(int threads, Level& middle, Level& tiny, std::vector<TokenRow> rows,
                           const std::vector<int64_t>& limits, const CheckedOptions& options);

}  // namespace mlspec
