"""Which mutants draft beyond their limits, or know what was rejected?"""

from __future__ import annotations

from ..mutant import Mutant

CHECKED = "hf_mlspec/speculation/drafters/checked.py"
MODEL = "hf_mlspec/speculation/drafters/model.py"

MUTANTS = [
    Mutant(
        "a level leaves no room for its check", CHECKED,
        "left = [limit - len(done) - 1 if a",
        "left = [limit - len(done) if a",
        ("speculation/test_chain.py::test_limits_are_filled_whatever_the_guesses_are",),
    ),
    Mutant(
        "a level drafts beyond its limit", CHECKED,
        "a and ok and len(done) < limit\n",
        "a and ok and len(done) <= limit\n",
        ("speculation/test_chain.py::test_limits_are_filled_whatever_the_guesses_are",),
    ),
    Mutant(
        "inner levels are not told what was rejected", CHECKED,
        "        roll_back(self.checker.runner, lengths)\n"
        "        self.inner.rollback(lengths)",
        "        roll_back(self.checker.runner, lengths)",
        ("speculation/test_chain.py::test_rollback_and_select_reach_both_halves",),
        quick=True,
    ),
    Mutant(
        "a checked level keeps what was rejected", CHECKED,
        "        roll_back(self.checker.runner, lengths)\n"
        "        self.inner.rollback(lengths)",
        "        self.inner.rollback(lengths)",
        ("speculation/test_chain.py::test_rollback_and_select_reach_both_halves",),
    ),
    Mutant(
        "after a round the inner level keeps one token too many", CHECKED,
        "self.inner.rollback([len(row) + a for",
        "self.inner.rollback([len(row) + a + 1 for",
        ("speculation/test_level_limits.py::test_the_level_below_hears_what_each_round_kept",),
        quick=True,
    ),
    Mutant(
        "inner levels are not told who left", CHECKED,
        "        self.checker.select(keep)\n"
        "        self.inner.select(keep)",
        "        self.checker.select(keep)",
        ("speculation/test_chain.py::test_rollback_and_select_reach_both_halves",),
    ),
    Mutant(
        "inner levels are not told who came", CHECKED,
        "        self.checker.admit(count)\n"
        "        self.inner.admit(count)",
        "        self.checker.admit(count)",
        ("speculation/test_continuous.py::test_rows_come_and_go",),
    ),
    Mutant(
        "checks inside an engine end rows one late", CHECKED,
        "left = [count - a - 1 if on else 0 for count, a, on in zip(left, accepted, alive, strict=True)]",
        "left = [count - a if on else 0 for count, a, on in zip(left, accepted, alive, strict=True)]",
        (
            "speculation/test_level_limits.py::test_checks_inside_an_engine_end_with_what_they_settled",
        ),
        quick=True,
    ),
    Mutant(
        "a level drafts beyond its positions", CHECKED,
        "fits = [len(row) + limit <= self.max_positions",
        "fits = [len(row) <= self.max_positions",
        ("speculation/test_chain.py::test_rows_beyond_its_positions_rest",),
        quick=True,
    ),
    Mutant(
        "tokens are put into the rows of the call", CHECKED,
        "seen = [list(row) for row in rows]",
        "seen = rows",
        ("speculation/test_chain.py::test_limits_are_filled_whatever_the_guesses_are",),
        quick=True,
    ),
    Mutant(
        "a model drafts one token too many", MODEL,
        "a and ok and n < limit for a, ok, n",
        "a and ok and n <= limit for a, ok, n",
        ("speculation/test_level_limits.py::test_a_model_drafts_as_many_tokens_as_it_may",),
        quick=True,
    ),
    Mutant(
        "a roll-back forgets what lies outside the window", MODEL,
        "[max(n - d, 0) for n, d in",
        "[n for n, d in",
        ("speculation/test_level_limits.py::test_what_is_rejected_is_counted_from_the_window",),
        quick=True,
    ),
    Mutant(
        "a new window keeps the old one's slots", MODEL,
        "                self.runner.lengths[r] = 0\n",
        "",
        ("speculation/test_level_limits.py::test_a_window_begins_with_an_empty_cache",),
        quick=True,
    ),
    Mutant(
        "a row that replaces another keeps its window", MODEL,
        "        self.dropped[row] = 0\n",
        "",
        (
            "speculation/test_level_limits.py::test_a_row_in_the_place_of_another_is_seen_from_its_beginning",
        ),
        quick=True,
    ),
    Mutant(
        "all drafted tokens have the first one's noise", MODEL,
        "[len(row) + step for row in rows]",
        "[len(row) for row in rows]",
        (
            "speculation/test_level_limits.py::test_a_sampled_draft_of_the_checkers_own_table_is_always_right",
        ),
        quick=True,
    ),
]  # fmt: skip
