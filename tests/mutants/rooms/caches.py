"""Which mutants read slots, rows or states that are not theirs?"""

from __future__ import annotations

from ..mutant import Mutant

ROWS = "hf_mlspec/engines/rows.py"
CACHE = "hf_mlspec/engines/modules/cache.py"
ATTENTION = "hf_mlspec/engines/modules/attention.py"
ENGINE = "hf_mlspec/engines/modules/engine.py"
CPU_ENGINE = "hf_mlspec/engines/cpu/engine.py"
CPU_ROWS = "hf_mlspec/engines/cpu/rows.py"
RECURRENT = "hf_mlspec/engines/recurrent.py"

MUTANTS = [
    Mutant(
        "a new sequence keeps the old one's slots", ROWS,
        "\"\"\"Give the slots of `row` to a new sequence.\"\"\"\n"
        "        self.lengths[row] = 0",
        "\"\"\"Give the slots of `row` to a new sequence.\"\"\"",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "lengths stay where rows move", ROWS,
        "self.lengths = [self.lengths[r] for r in keep]",
        "self.lengths = self.lengths[: len(keep)]",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "a row that joins holds a slot", ROWS,
        "self.lengths = self.lengths + [0] * count",
        "self.lengths = self.lengths + [1] * count",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "rows that move overwrite each other", ROWS,
        "if all(row > place for place, row in moves):",
        "if any(row > place for place, row in moves):",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "rows that left stay in the cache", ROWS,
        "                layer[:, : len(keep)] = layer[:, keep]\n"
        "        self.rows = len(keep)",
        "                layer[:, : len(keep)] = layer[:, keep]\n"
        "        self.rows = self.rows",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "a cache has one row too few", ROWS,
        "if wanted > batch:\n"
        "            self._become(grown",
        "if wanted > batch + 1:\n"
        "            self._become(grown",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "a cache grows one slot late", ROWS,
        "        if slots > have:\n"
        "            sizes",
        "        if slots > have + 1:\n"
        "            sizes",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "rotary tables grow one position late", ROWS,
        "if slots > self.decoder.positions:",
        "if slots > self.decoder.positions + 1:",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "a beginning is longer than it counts", ROWS,
        "end = min(first + piece.shape[3], count)",
        "end = first + piece.shape[3]",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
            "integration/test_long_prefill.py",
            "integration/test_stream_prompts.py",
        ),
    ),
    Mutant(
        "pieces of a beginning lie over each other", ROWS,
        "            self.cache.kv[:, :, row, :, first:end] = piece[:, :, :, : end - first]\n"
        "            first = end",
        "            self.cache.kv[:, :, row, :, first:end] = piece[:, :, :, : end - first]\n"
        "            first = 0",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
            "integration/test_long_prefill.py",
            "integration/test_stream_prompts.py",
        ),
    ),
    Mutant(
        "a copied row is one slot short", ROWS,
        "self.kv[:, :, index, :, start:end]]",
        "self.kv[:, :, index, :, start : end - 1]]",
        ("integration/test_outputs.py",),
    ),
    Mutant(
        "a users' cache is loaded into the first row alone", ROWS,
        "into[: self.rows, :, :length] = states if",
        "into[:1, :, :length] = states[:1] if",
        ("integration/test_outputs.py", "engines/test_cached_rows.py",),
    ),
    Mutant(
        "values of ragged lanes stay where rows move", CACHE,
        "lane.keys, lane.values = lane.keys[index], lane.values[index]",
        "lane.keys, lane.values = lane.keys[index], lane.values[: len(index)]",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "ragged lanes sort their rows", CACHE,
        "index = torch.tensor(keep, dtype=torch.long",
        "index = torch.tensor(sorted(keep), dtype=torch.long",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "a shrunk lane loses its last slots", CACHE,
        "t[:, :, :slots].clone(",
        "t[:, :, : slots - 256].clone(",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "a query sees the slot behind it", ATTENTION,
        "hidden = slot > query if window is None",
        "hidden = slot > query + 1 if window is None",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
            "engines/test_module_engine.py",
        ),
    ),
    Mutant(
        "a window is one slot wider", ATTENTION,
        "(slot <= query - window)",
        "(slot < query - window)",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
            "integration/test_windows.py",
        ),
    ),
    Mutant(
        "a single token sees slots of longer rows", ATTENTION,
        "if self.width == 1 and self.uniform and window is None:",
        "if self.width == 1 and window is None:",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "rows of different lengths write where the first does", ATTENTION,
        "self.uniform = len(set(starts)) == 1",
        "self.uniform = True",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "a step counts padding", ENGINE,
        "self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]",
        "self.lengths = [have + tokens.shape[1] for have, count in zip(self.lengths, counts, strict=True)]",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "logits are those of the first tokens fed", ENGINE,
        "return self.step(tokens, counts, [m - 1 for m in missing], width + 1)",
        "return self.step(tokens, counts, [0 for m in missing], width + 1)",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "a ragged row is fed without its guess", ENGINE,
        "fed = [row[len(row) - m :] + guess for",
        "fed = [row[len(row) - m :] for",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "logits of ragged rows are the first row's", ENGINE,
        "logits = logits[torch.arange(len(first), device=logits.device)[:, None], gather",
        "logits = logits[torch.zeros(len(first), dtype=torch.long, device=logits.device)[:, None], gather",
        (
            "engines/test_module_cache.py::test_every_row_of_a_batch_is_scored_as_if_alone",
            "engines/test_module_cache.py::test_select_keeps_rows_in_the_order_asked_for",
            "engines/test_cached_rows.py::test_slots_of_rows_that_left_are_taken_again",
            "engines/test_cached_rows.py::test_rows_come_and_go_without_a_trace",
        ),
    ),
    Mutant(
        "an engine counts the token that it did not feed", CPU_ENGINE,
        "            len(row) + len(new) - 1 if new else have",
        "            len(row) + len(new) if new else have",
        (
            "engines/test_cpu_engine.py::test_score_feed_and_step_say_the_same",
            "engines/test_cpu_engine.py::test_compiled_rounds_are_the_plain_ones",
        ),
    ),
    Mutant(
        "two levels of an engine begin where the longer one ends", CPU_ENGINE,
        "bases = [min(pair) for pair in",
        "bases = [max(pair) for pair in",
        (
            "engines/test_cpu_engine.py::test_score_feed_and_step_say_the_same",
            "engines/test_cpu_engine.py::test_compiled_rounds_are_the_plain_ones",
        ),
    ),
    Mutant(
        "the last token of a long prompt is read ahead", CPU_ENGINE,
        "min(len(row) - 1 - start, PIECE - sum(counts))",
        "min(len(row) - start, PIECE - sum(counts))",
        (
            "engines/test_cpu_engine.py::test_score_feed_and_step_say_the_same",
            "engines/test_cpu_engine.py::test_compiled_rounds_are_the_plain_ones",
            "integration/test_long_prefill.py",
        ),
    ),
    Mutant(
        "an engine scores a row at rest", CPU_ENGINE,
        "fed = [r[n:] + g if on else []",
        "fed = [r[n:] + g",
        (
            "engines/test_cpu_engine.py::test_score_feed_and_step_say_the_same",
            "engines/test_cpu_engine.py::test_compiled_rounds_are_the_plain_ones",
        ),
    ),
    Mutant(
        "an engine scores one guess too few", CPU_ENGINE,
        "kept = [len(guess) + 1 if on else 0 for guess, on",
        "kept = [max(len(guess), 1) if on else 0 for guess, on",
        (
            "engines/test_cpu_engine.py::test_score_feed_and_step_say_the_same",
            "engines/test_cpu_engine.py::test_compiled_rounds_are_the_plain_ones",
        ),
    ),
    Mutant(
        "a follower begins with a state that its leader has not", CPU_ROWS,
        "if start > leader.lengths[row])",
        "if start > leader.lengths[row] + 1)",
        ("engines/test_delta_nets.py",),
    ),
    Mutant(
        "states stay where rows move", CPU_ROWS,
        "        if self.states is not None:\n"
        "            self.states.select(keep)",
        "",
        ("engines/test_delta_nets.py",),
    ),
    Mutant(
        "a new sequence begins with the old one's state", CPU_ROWS,
        "        if self.states is not None:\n"
        "            self.states.forget(row)",
        "",
        ("engines/test_delta_nets.py",),
    ),
    Mutant(
        "inputs of a smaller window are put into wrong places", RECURRENT,
        "inputs[:, row, tokens_held % window]",
        "inputs[:, row, tokens_held % self.window]",
        ("engines/test_delta_nets.py",),
    ),
    Mutant(
        "a row that joins has the states of one that left", RECURRENT,
        "        for row in range(self.rows, wanted):\n"
        "            self.forget(row)\n",
        "",
        ("engines/test_delta_nets.py",),
    ),
]  # fmt: skip
