"""Which mutants let captured rounds run with rows, levels or noise of others?"""

from __future__ import annotations

from ..mutant import Mutant

PROGRAM = "hf_mlspec/speculation/rounds/program.py"
STATE = "hf_mlspec/speculation/rounds/state.py"
READING = "hf_mlspec/speculation/rounds/reading.py"
CAPTURED = "hf_mlspec/speculation/rounds/captured.py"

MUTANTS = [
    Mutant(
        "a level in the middle is fed one token too few", PROGRAM,
        "return index - since + 1 if",
        "return index - since if",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "levels are fed as if none had checked since", PROGRAM,
        "            self._check(state, report, next(checks), since)\n"
        "            since = index",
        "            self._check(state, report, next(checks), since)\n"
        "            since = index + 1",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "seeds of rows are mixed up", PROGRAM,
        "rows[:, None].expand(-1, each).reshape(-1).contiguous()",
        "rows[None].expand(each, -1).reshape(-1).contiguous()",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "noise is added to logits that were not divided", PROGRAM,
        "        if self.divided:",
        "        if False:",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "a row that joins has failed already", STATE,
        "        self.failed.index_fill_(0, index, 0)\n",
        "",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "seeds stay where rows move", STATE,
        "            (self.seeds, 0), (self.temperatures, 0),",
        "            (self.temperatures, 0),",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "streams stay where rows move", STATE,
        "(self.failed, 0), (self.streams, 0),\n",
        "(self.failed, 0),\n",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "rows that ended take part", STATE,
        "            going[place], until[place] = 1, end",
        "            going[place - 1], until[place] = 1, end",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "tokens stay where the state grows", STATE,
        "self.tokens[:rows, :slots] = other.tokens",
        "self.tokens[:rows, : slots - 1] = other.tokens[:, : slots - 1]",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "a grown state forgets its lengths", STATE,
        "for name in (\"lengths\", \"active\", \"ends\", \"script\", \"cursor\"):",
        "for name in (\"active\", \"ends\", \"script\", \"cursor\"):",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "a level that lacks a token does not read it", READING,
        "and len(row) - held[r] > depth + 1",
        "and len(row) - held[r] > depth + 2",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "a level that drafted nothing is said to know the row", READING,
        "if len(row) + depth < end(r):",
        "if True:",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "levels know the row that another replaced", READING,
        "        self._last[r] = None\n"
        "        for line in self._held:\n"
        "            line[r] = 0",
        "",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "rows that lie apart are read as neighbours", READING,
        "places[last] == places[last - 1] + 1",
        "places[last] > places[last - 1]",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "places are given to rows in their order", READING,
        "key=lambda r: -len(rows[r]))",
        "key=lambda r: 0)",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "a row keeps slots that its predecessor had otherwise", READING,
        "return [min(max(same - 1, 0), len(row) - 1)",
        "return [min(same + 1, len(row) - 1)",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "rows go on in the places of others", CAPTURED,
        "self._reported = [lines[place] for place in self.places]",
        "self._reported = lines[: len(self.places)]",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "a row is read with the tokens of another", CAPTURED,
        "at, lines = [places[r] for r in order], [rows[r] for r in order]",
        "at, lines = [places[r] for r in order], rows",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
    Mutant(
        "a row's noise is that of another number", CAPTURED,
        "[self.noise(numbers[r]) for r in order]",
        "[self.noise(r) for r in order]",
        (
            "speculation/test_captured_rounds.py::test_rows_leave_and_join_until_the_places_shrink_and_grow_again",
            "speculation/test_captured_rounds.py::test_rows_come_and_go",
        ),
    ),
]  # fmt: skip
