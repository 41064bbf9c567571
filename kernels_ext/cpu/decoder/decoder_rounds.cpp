// How do several passes become one call? One thread decides, the whole team computes, inside a single parallel region.
#include "decoder_rounds.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

#include "../attention/attention_limits.h"

namespace mlspec {
namespace {

using Clock = std::chrono::steady_clock;

// Hands passes from the deciding thread to the team.
class Driver {
 public:
  Driver(Team& team, Pass*& current) : team_(team), current_(current) {}
  void execute(Level& level, Pass& pass) {
    const Clock::time_point begin = Clock::now();
    level.decoder->prepare(pass, team_.size());
    current_ = &pass;
    team_.barrier();
    level.decoder->forward(team_, pass);
    if (level.decoder->planes_missing) throw PassFailed("streamed planes could not be had");
    if (level.decoder->rank_lost) throw PassFailed("a process that shares the model is gone");
    level.seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    ++level.forwards;
  }
  void finish() {
    current_ = nullptr;
    team_.barrier();
  }

 private:
  Team& team_;
  Pass*& current_;
};

template <class Control>
void drive(int threads, Control&& control) {
  Pass* current = nullptr;
  std::exception_ptr failure;  // of the deciding thread: it may run out of memory between passes
  run(threads, [&](Team& team) {
    if (team.index() == 0) {
      Driver driver(team, current);
      try {
        control(driver);
      } catch (...) {
        failure = std::current_exception();
      }
      driver.finish();
      return;
    }
    for (;;) {
      team.barrier();
      if (!current) return;
      current->decoder->forward(team, *current);
    }
  });
  if (failure) std::rethrow_exception(failure);
}

// One pass after the other over the tokens that the level has not seen, at most kMaxTokens in each.
class Feeder {
 public:
  Feeder(Driver& driver, Level& level, bool want_confidence, float* logits, Scored& out)
      : driver_(driver), level_(level), logits_(logits), out_(out) {
    pass_.decoder = level.decoder;
    pass_.kv = level.kv;
    pass_.want_confidence = want_confidence;
    pass_.bits = level.bits;
    pass_.widths = level.widths, pass_.choose = level.choose, pass_.mixes = level.mixes;
    pass_.draft_window = level.draft_window;
    pass_.states = level.states;
    pass_.tap = level.tap;
  }

  // Row `row` goes on behind `length` tokens. in_place: nobody goes back to that length.
  void begin(int64_t row, int64_t length, bool in_place) {
    if (!level_.states) return;
    const RecurrentStates& own = level_.states;
    if (const RecurrentStates* const source = std::exchange(level_.sources[row], nullptr)) {
      own.forget(row);
      state_ = length > 0 ? 0 : RecurrentStates::kZeros;
      if (length > 0) {
        pass_.forks.push_back({*source, own, row, length, taken_over(*source, row, length), 0});
        marks_.insert(marks_.end(), {{own.lengths(row), length}, {&own.first(row), std::max<int64_t>(length - own.before, 0)},
                                     {&own.end(row), length}});
      }
    } else if (length == 0) {  // also of a row whose first inputs are there no more
      own.forget(row);
      state_ = RecurrentStates::kZeros;
    } else {
      state_ = settled(own, row, length);
      own.cut(row, length);
    }
    in_place_ = of_kept_ = in_place;
  }

  void add(int64_t row, int64_t position, int64_t token, bool kept) {
    if (level_.states) run_on(row, position, pass_.tokens.size(), kept);
    put(row, position, position, token, kept, false);
  }

  // A node of the tree behind `row`, in depth-first order.
  void add_node(int64_t row, int64_t position, int64_t slot, int64_t token) { put(row, position, slot, token, true, true); }

  void put(int64_t row, int64_t position, int64_t slot, int64_t token, bool kept, bool branch) {
    const int64_t index = pass_.tokens.size();
    Segment* const last = pass_.blocks.empty() ? nullptr : &pass_.blocks.back();
    const bool same = last && last->row == row && last->branch == branch;
    if (same && last->count < kAttentionTokens && last->start + last->count == position) {
      ++last->count;
    } else {
      if (!(same && branch)) pass_.items.push_back(pass_.blocks.size());
      pass_.blocks.push_back({row, position, index, 1, branch});
    }
    pass_.slots.push_back(slot);
    pass_.tokens.push_back(std::clamp<int64_t>(token, 0, level_.decoder->shape.embeddings - 1));
    pass_.positions.push_back(position);
    pass_.rows.push_back(row);
    if (kept) pass_.kept.push_back(index);
    if (index + 1 == Decoder::kMaxTokens && (!pass_.choose || pass_.mixes)) flush();  // a prompt's choice is by all of a row
  }

  void flush() {
    if (pass_.tokens.empty()) return;
    pass_.logits = logits_;
    try {
      driver_.execute(level_, pass_);
    } catch (const PassFailed&) {  // inputs that states of these rows count on may be overwritten
      for (const Run& run : pass_.runs) pass_.states.forget(run.row);
      throw;
    }
    if (pass_.choose) level_.widths = pass_.widths;
    for (const auto& [mark, value] : marks_) *mark = value;
    for (const Run& run : pass_.runs) {
      const RecurrentStates& own = pass_.states;
      own.lengths(run.row)[run.to] = own.end(run.row) = run.start + run.count;
      own.first(run.row) = std::max(own.first(run.row), own.end(run.row) - own.window);
    }
    pass_.runs.clear(), pass_.row_runs.clear(), pass_.replays.clear(), pass_.forks.clear(), marks_.clear();
    out_.best.insert(out_.best.end(), pass_.best.begin(), pass_.best.end());
    out_.confidence.insert(out_.confidence.end(), pass_.confidence.begin(), pass_.confidence.end());
    if (logits_) logits_ += pass_.kept.size() * level_.decoder->shape.vocab;
    for (auto* list : {&pass_.tokens, &pass_.positions, &pass_.rows, &pass_.kept, &pass_.slots, &pass_.items}) list->clear();
    pass_.blocks.clear();
  }

 private:
  // The state of `source` with which `row` begins as its first; kZeros where a replay of this pass makes that. A decoder of fewer layers
  // leaves its source's states as they are.
  int64_t taken_over(const RecurrentStates& source, int64_t row, int64_t length) {
    if (source.layers == level_.states.layers) return settled(source, row, length);
    int64_t found = 0;
    const int64_t from = source.nearest(row, length, found), have = source.length(row, from);
    require(found == length);
    if (have == length) return from;
    pass_.replays.push_back({source, level_.states, row, have, length, from, 0});
    return RecurrentStates::kZeros;
  }

  static void require(bool there) {
    if (!there) throw std::logic_error("a row goes on behind tokens of which there is no state");
  }

  // The state of `row` of exactly `length` tokens, by its number, made again before this pass where it has to be.
  int64_t settled(const RecurrentStates& states, int64_t row, int64_t length) {
    int64_t found = 0;
    const int64_t from = states.nearest(row, length, found);
    require(found == length);
    const int64_t have = states.length(row, from);
    if (have == length) return from;
    const int64_t to = states.place(row, from);
    pass_.replays.push_back({states, states, row, have, length, from, to});
    states.lengths(row)[to] = -1;
    marks_.emplace_back(states.lengths(row) + to, length);
    return to;
  }

  // Another token of `row`: a run goes on, or one begins, in a state of its own where the one before may be gone back to.
  void run_on(int64_t row, int64_t position, int64_t index, bool kept) {
    const RecurrentStates& own = level_.states;
    const bool same_row = !pass_.runs.empty() && pass_.runs.back().row == row;
    if (same_row && of_kept_ == kept) {
      ++pass_.runs.back().count;
      return;
    }
    if (!same_row) pass_.row_runs.push_back(pass_.runs.size());
    const bool goes_on = in_place_ && of_kept_ == kept;  // a run that a pass before this one began, or a draft's
    const int64_t to = goes_on ? state_ : own.place(row, state_);
    own.lengths(row)[to] = -1;  // until the pass is done
    pass_.runs.push_back({row, position, index, 1, state_, to});
    state_ = to, in_place_ = true, of_kept_ = kept;
  }

  Driver& driver_;
  Level& level_;
  float* logits_;
  Scored& out_;
  Pass pass_;
  int64_t state_ = 0;  // of the row that tokens are added of: where it is now
  bool in_place_ = false, of_kept_ = false;
  std::vector<std::pair<int64_t*, int64_t>> marks_;  // of states that are there, and of what, when the next pass is done
};

Scored feed(Driver& driver, Level& level, const std::vector<TokenRow>& rows, const std::vector<int64_t>& kept,
            bool want_confidence, float* logits, bool in_place = false) {
  Scored out;
  Feeder feeder(driver, level, want_confidence, logits, out);
  int64_t total = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    out.offsets.push_back(total);
    if (kept[r] == 0) continue;
    const int64_t end = rows[r].end(), nodes = rows[r].nodes.size(), deepest = rows[r].deepest();
    total += kept[r] + nodes;
    level.lengths[r] = std::min(level.lengths[r], end - kept[r]);  // a kept token is scored, cached or not
    feeder.begin(r, level.lengths[r], in_place);
    for (int64_t i = level.lengths[r]; i < end; ++i)
      feeder.add(r, i, rows[r].tokens[i - rows[r].base], i >= end - kept[r]);
    for (int64_t j = 0; j < nodes; ++j)
      feeder.add_node(r, end - 1 + rows[r].depths[j], end + deepest + j, rows[r].nodes[j]);
    level.lengths[r] = end;
  }
  out.offsets.push_back(total);
  feeder.flush();
  return out;
}

std::vector<std::vector<int64_t>> draft_on(Driver& driver, Level& level, std::vector<TokenRow>& rows,
                                           const std::vector<int64_t>& limits, float threshold) {
  std::vector<std::vector<int64_t>> drafted(rows.size());
  std::vector<int64_t> kept(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) kept[r] = limits[r] > 0;
  for (bool first = true; std::any_of(kept.begin(), kept.end(), [](int64_t k) { return k > 0; }); first = false) {
    const Scored scored = feed(driver, level, rows, kept, threshold > 0, nullptr, !first);
    for (size_t r = 0; r < rows.size(); ++r) {
      if (!kept[r]) continue;
      const int64_t token = scored.best[scored.offsets[r]];
      drafted[r].push_back(token);
      rows[r].tokens.push_back(token);
      const bool sure = threshold <= 0 || scored.confidence[scored.offsets[r]] >= threshold;
      kept[r] = sure && token >= 0 && static_cast<int64_t>(drafted[r].size()) < limits[r];
    }
  }
  return drafted;
}

// One round of `middle` over `tiny` for the rows with room: extends rows by what was settled, clears `alive` where it ends.
void check_round(Driver& driver, Level& middle, Level& tiny, std::vector<TokenRow>& rows,
                 const std::vector<int64_t>& limits, const CheckedOptions& options, std::vector<char>& alive,
                 CheckedDraft& out) {
  const size_t batch = rows.size();
  if (follows(tiny, middle)) {  // what was checked stays as it is
    tiny.lengths = middle.lengths;
    for (size_t r = 0; r < tiny.sources.size(); ++r) tiny.sources[r] = middle.sources[r] ? middle.sources[r] : &middle.states;
  }
  int64_t most = options.num_draft_tokens;  // of states no more than can be taken back
  for (const RecurrentStates* states : {&middle.states, &tiny.states})
    if (*states) most = std::min(most, states->window - states->before - 1);
  std::vector<int64_t> room(batch), kept(batch), before(batch);
  for (size_t r = 0; r < batch; ++r) {
    const int64_t left = limits[r] - static_cast<int64_t>(out.settled[r].size()) - 1;
    room[r] = alive[r] ? std::clamp<int64_t>(left, 0, most) : 0;
    before[r] = rows[r].end();
  }
  const auto guesses = draft_on(driver, tiny, rows, room, options.tiny_threshold);
  for (size_t r = 0; r < batch; ++r) kept[r] = alive[r] ? static_cast<int64_t>(guesses[r].size()) + 1 : 0;
  const Scored scored = feed(driver, middle, rows, kept, options.middle_threshold > 0, nullptr);
  for (size_t r = 0; r < batch; ++r) {
    rows[r].tokens.resize(before[r] - rows[r].base);
    if (!alive[r]) continue;
    const int64_t* const best = scored.best.data() + scored.offsets[r];
    int64_t accepted = 0;
    const int64_t drafted = guesses[r].size();
    while (accepted < drafted && guesses[r][accepted] == best[accepted] && best[accepted] >= 0) ++accepted;
    bool sure = true;
    for (int64_t j = 0; j <= accepted; ++j) {
      out.settled[r].push_back(best[j]);
      rows[r].tokens.push_back(best[j]);
      if (options.middle_threshold > 0) sure &= scored.confidence[scored.offsets[r] + j] >= options.middle_threshold;
    }
    out.inner.emplace_back(drafted, accepted);
    middle.lengths[r] = std::min(middle.lengths[r], before[r] + accepted);
    tiny.lengths[r] = std::min(tiny.lengths[r], before[r] + accepted);
    alive[r] = sure && best[accepted] >= 0 && static_cast<int64_t>(out.settled[r].size()) < limits[r];
  }
  ++out.rounds;
}

}  // namespace

bool follows(const Level& level, const Level& leader) {
  if (level.kv.data || leader.kv.data) return level.kv.data == leader.kv.data;
  return level.owners && level.owners->size() > 1 && (*level.owners)[1].states == leader.states.states;
}

Scored score(int threads, Level& level, const std::vector<TokenRow>& rows, const std::vector<int64_t>& kept,
             bool want_confidence, float* logits) {
  Scored out;
  drive(threads, [&](Driver& driver) { out = feed(driver, level, rows, kept, want_confidence, logits); });
  return out;
}

std::vector<std::vector<int64_t>> draft(int threads, Level& level, std::vector<TokenRow> rows,
                                        const std::vector<int64_t>& limits, float threshold) {
  std::vector<std::vector<int64_t>> drafted;
  drive(threads, [&](Driver& driver) { drafted = draft_on(driver, level, rows, limits, threshold); });
  return drafted;
}

CheckedDraft draft_checked(int threads, Level& middle, Level& tiny, std::vector<TokenRow> rows,
                           const std::vector<int64_t>& limits, const CheckedOptions& options) {
  CheckedDraft out;
  out.settled.resize(rows.size());
  std::vector<char> alive(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) alive[r] = limits[r] > 0;
  drive(threads, [&](Driver& driver) {
    while (std::any_of(alive.begin(), alive.end(), [](char a) { return a != 0; }))
      check_round(driver, middle, tiny, rows, limits, options, alive, out);
  });
  return out;
}

}  // namespace mlspec
