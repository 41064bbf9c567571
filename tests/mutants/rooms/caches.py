"""Which mutants read slots, rows or states that are not theirs?"""

from __future__ import annotations

from ..mutant import Mutant

ROWS = "hf_mlspec/engines/rows.py"
CACHE = "hf_mlspec/engines/modules/cache.py"
ATTENTION = "hf_mlspec/engines/modules/attention.py"

MUTANTS = [
    Mutant(
        "a new sequence keeps the old one's slots", ROWS,
        "\"\"\"Give the slots of `row` to a new sequence.\"\"\"\n"
        "        self.lengths[row] = 0",
        "\"\"\"Give the slots of `row` to a new sequence.\"\"\"",
        ("engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",),
    ),
    Mutant(
        "lengths stay where rows move", ROWS,
        "self.lengths = [self.lengths[r] for r in keep]",
        "self.lengths = self.lengths[: len(keep)]",
        ("engines/test_cached_rows.py::test_lengths_move_with_their_rows",),
    ),
    Mutant(
        "a row that joins holds a slot", ROWS,
        "self.lengths = self.lengths + [0] * count",
        "self.lengths = self.lengths + [1] * count",
        ("engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",),
    ),
    Mutant(
        "rows that move overwrite each other", ROWS,
        "or all(row > place for place, row in moves):",
        "or any(row > place for place, row in moves):",
        ("engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",),
    ),
    Mutant(
        "rows that left stay in the cache", ROWS,
        "                layer[:, : len(keep)] = layer[:, keep]\n"
        "        self.rows = len(keep)",
        "                layer[:, : len(keep)] = layer[:, keep]\n"
        "        self.rows = self.rows",
        ("engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",),
    ),
    Mutant(
        "a cache has one row too few", ROWS,
        "if wanted > batch:",
        "if wanted > batch + 1:",
        ("engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",),
    ),
    Mutant(
        "a cache grows one slot late", ROWS,
        "        if slots > have:\n"
        "            sizes",
        "        if slots > have + 1:\n"
        "            sizes",
        ("engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",),
    ),
    Mutant(
        "a copied row is one slot short", ROWS,
        "self.kv[:, :, index, :, start:end], self.cuts",
        "self.kv[:, :, index, :, start : end - 1], self.cuts",
        (
            "integration/test_outputs.py::test_the_cache_of_a_batch_comes_out_of_compiled_steps_and_captured_rounds",
        ),
    ),
    Mutant(
        "a users' cache is loaded into the first row alone", ROWS,
        "into[: self.rows, : kept.shape[1], :length, : kept.shape[-1]] = kept",
        "into[:1, : kept.shape[1], :length, : kept.shape[-1]] = kept[:1]",
        (
            "integration/test_outputs.py::test_the_cache_of_a_batch_comes_out_of_compiled_steps_and_captured_rounds",
        ),
    ),
    Mutant(
        "values of ragged lanes stay where rows move", CACHE,
        "lane.keys, lane.values = lane.keys[index], lane.values[index]",
        "lane.keys, lane.values = lane.keys[index], lane.values[: len(index)]",
        ("engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",),
    ),
    Mutant(
        "ragged lanes sort their rows", CACHE,
        "index = torch.tensor(keep, dtype=torch.long",
        "index = torch.tensor(sorted(keep), dtype=torch.long",
        ("engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",),
    ),
    Mutant(
        "a shrunk lane loses its last slots", CACHE,
        "t[:, :, :slots].clone(",
        "t[:, :, : slots - 256].clone(",
        ("speculation/test_level_limits.py::test_a_shrunk_lane_keeps_its_first_slots",),
        quick=True,
    ),
    Mutant(
        "a query sees the slot behind it", ATTENTION,
        "hidden = slot > query if window is None",
        "hidden = slot > query + 1 if window is None",
        ("engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",),
    ),
]  # fmt: skip
