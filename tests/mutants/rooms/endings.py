"""Which mutants end rows wrongly, or hand out what is not theirs?"""

from __future__ import annotations

from ..mutant import Mutant

LOOP = "hf_mlspec/speculation/loop.py"
HOST = "hf_mlspec/speculation/rounds/host.py"
PROCESSING = "hf_mlspec/integration/processing.py"

MUTANTS = [
    Mutant(
        "the end of a sequence is not kept", LOOP,
        "(last + 1, True)",
        "(last, True)",
        ("speculation/test_decode.py::test_a_row_ends_behind_the_first_of_the_ends_it_gains",),
        quick=True,
    ),
    Mutant(
        "numbers stay where rows leave", LOOP,
        "self.rows, self.numbers, self.lengths = ([line[r] for r in keep] for line in lines)",
        "self.rows, _, self.lengths = ([line[r] for r in keep] for line in lines)",
        ("speculation/test_decode.py::test_rows_leave_when_they_stop",),
    ),
    Mutant(
        "an end in the prompt ends a row", LOOP,
        "for place, token in enumerate(tokens) if token in self.ends",
        "for place, token in enumerate(row[:1] + tokens[1:]) if token in self.ends",
        ("speculation/test_decode.py::test_a_row_ends_behind_the_first_of_the_ends_it_gains",),
    ),
    Mutant(
        "a host round leaves no room for the correction", HOST,
        "rooms = [end - len(row) - 1 if ready",
        "rooms = [end - len(row) if ready",
        ("speculation/test_decode.py::test_limits_leave_room_for_the_correction",),
    ),
    Mutant(
        "levels keep one token that the target rejected", HOST,
        "self.drafter.rollback([len(row) + a for row",
        "self.drafter.rollback([len(row) + a + 1 for row",
        ("speculation/test_decode.py::test_levels_hear_what_was_true",),
    ),
    Mutant(
        "a level in the target's cache drafts before the prefill", HOST,
        "self._ready, self._ends = [not self._waits] * len(rows), list(ends)",
        "self._ready, self._ends = [True] * len(rows), list(ends)",
        ("speculation/test_decode.py::test_a_level_in_the_targets_cache_waits_for_the_prefill",),
    ),
    Mutant(
        "tokens behind a stop count", PROCESSING,
        "return count, True\n"
        "        return len(tokens), False",
        "return len(tokens), True\n"
        "        return len(tokens), False",
        (
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "the token that stops a row is dropped", PROCESSING,
        "                return count, True\n"
        "        return",
        "                return count - 1, True\n"
        "        return",
        (
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "tokens behind a batch's criterion stay", PROCESSING,
        "                del row[start + end :]",
        "                del row[start + end + 1 :]",
        (
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "a criterion sees tokens of rows that ended", PROCESSING,
        "row + new[:end] for number",
        "row + new for number",
        (
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "padding is read as tokens", PROCESSING,
        "[t for t, m in zip(line, flags, strict=True) if m] for line",
        "[t for t, m in zip(line, flags, strict=True)] for line",
        (
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
]  # fmt: skip
