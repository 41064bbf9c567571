"""Which mutants end rows wrongly, or hand out what is not theirs?"""

from __future__ import annotations

from ..mutant import Mutant

LOOP = "hf_mlspec/speculation/loop.py"
HOST = "hf_mlspec/speculation/rounds/host.py"
PROCESSING = "hf_mlspec/integration/processing.py"
CALL = "hf_mlspec/integration/call.py"
RETURNED_CACHE = "hf_mlspec/integration/returned_cache.py"
ROUNDS = "hf_mlspec/integration/stream/rounds.py"

MUTANTS = [
    Mutant(
        "a row passes its longest length", LOOP,
        "            tokens = tokens[: self.lengths[r] - len(row)]\n",
        "",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "the end of a sequence is not kept", LOOP,
        "(last + 1, True)",
        "(last, True)",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "a full row goes on", LOOP,
        "if not finished and len(row) < self.lengths[r]:",
        "if not finished and len(row) <= self.lengths[r]:",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "numbers stay where rows leave", LOOP,
        "self.rows, self.numbers, self.lengths = ([line[r] for r in keep] for line in lines)",
        "self.rows, _, self.lengths = ([line[r] for r in keep] for line in lines)",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "a row that replaces another has its length", LOOP,
        "self.rows[r], self.numbers[r], self.lengths[r] = row, number, end",
        "self.rows[r], self.numbers[r] = row, number",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "an end in the prompt ends a row", LOOP,
        "for place, token in enumerate(tokens) if token in self.ends",
        "for place, token in enumerate(row[:1] + tokens[1:]) if token in self.ends",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "a host round leaves no room for the correction", HOST,
        "rooms = [end - len(row) - 1 if ready",
        "rooms = [end - len(row) if ready",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "a row keeps more slots than its predecessor had", HOST,
        "kept = min(runner.lengths[r], same) if runner.can.bit_exact else 0",
        "kept = same if runner.can.bit_exact else 0",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "a module row keeps its predecessor's slots", HOST,
        "kept = min(runner.lengths[r], same) if runner.can.bit_exact else 0",
        "kept = runner.lengths[r]",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "levels keep one token that the target rejected", HOST,
        "self.drafter.rollback([len(row) + a for row",
        "self.drafter.rollback([len(row) + a + 1 for row",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "levels are not told of a row that is replaced", HOST,
        "                    level.replace(r)",
        "                    pass",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "a level in the target's cache drafts before the prefill", HOST,
        "self._ready, self._ends = [not self._waits] * len(rows), list(ends)",
        "self._ready, self._ends = [True] * len(rows), list(ends)",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "ends stay where rows leave", HOST,
        "self._ready, self._ends = ([line[r] for r in keep] for line in (self._ready, self._ends))",
        "self._ready = [self._ready[r] for r in keep]; self._ends = self._ends[: len(keep)]",
        ("speculation/test_decode.py",),
    ),
    Mutant(
        "tokens behind a stop count", PROCESSING,
        "return count, True\n"
        "        return len(tokens), False",
        "return len(tokens), True\n"
        "        return len(tokens), False",
        (
            "integration/test_stopping.py::test_end_of_sequence",
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
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "tokens behind a batch's criterion stay", PROCESSING,
        "                del row[start + end :]",
        "                del row[start + end + 1 :]",
        (
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "a criterion sees tokens of rows that ended", PROCESSING,
        "row + new[:end] for number",
        "row + new for number",
        (
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "padding is read as tokens", PROCESSING,
        "[t for t, m in zip(line, flags, strict=True) if m] for line",
        "[t for t, m in zip(line, flags, strict=True)] for line",
        (
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "processors of a batch answer for other rows", PROCESSING,
        "everyone)[numbers]",
        "everyone)[: len(numbers)]",
        (
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "scores are those of the next token", CALL,
        "values[r, : len(tokens)].to",
        "values[r, 1 : len(tokens) + 1].to",
        (
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "scores are filed under the place of a row", CALL,
        "store[number] += values[r",
        "store[r] += values[r",
        (
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "a row's tail is filled from the left", CALL,
        "line + [prompts.filler] * (width - len(line)) for line in new",
        "[prompts.filler] * (width - len(line)) + line for line in new",
        (
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "the returned cache is that of the row's place", RETURNED_CACHE,
        "cache.row(place, self._skipped(number)",
        "cache.row(0, self._skipped(number)",
        (
            "integration/test_stopping.py::test_end_of_sequence",
            "integration/test_stopping.py::test_a_criterion_is_asked_about_the_whole_batch_as_in_stock",
        ),
    ),
    Mutant(
        "a request's noise depends on its number", ROUNDS,
        "Noise(rule.seed, 0, rule.temperature)",
        "Noise(rule.seed, number, rule.temperature)",
        ("integration/test_stream.py",),
    ),
]  # fmt: skip
