"""How fast would captured rounds decode, if their drafts were accepted as a trace says? The device gets verdicts.

A captured round decides by itself what it accepts, so a replay cannot replace the result of each check from
the host, as the step-by-step replay does. Instead the verdicts are on the device, in the order of the checks, and
every pass runs with the shapes of its captured round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engines.rows import up_to_growth
from ..integration.compare import accumulate
from ..integration.config import SpeculationConfig
from ..speculation.loop import Loop
from ..speculation.rounds.caches import adopt
from ..speculation.rounds.captured import CapturedRounds
from ..speculation.rounds.chain import BUCKETS, CapturedChain, bucket_of
from ..speculation.rounds.plan import NotCaptured, round_levels
from ..speculation.rounds.program import LookupLevel
from ..speculation.traces.trace import Round, Trace, TracedRow, rounds_at
from .traces_replay import ReplayedChain, ReplayResult, replayed


def replay_captured(
    model: PreTrainedModel,
    trace: Trace,
    levels: Sequence[Any],
    *,
    batch_size: int = 1,
    max_new_tokens: int | None = None,
    rows: Sequence[int] | None = None,
    speculation_config: SpeculationConfig | dict | None = None,
    name: str | None = None,
) -> ReplayResult:
    """`replay` in captured rounds, with the same arguments and result.

    A round always runs at its full length. Shorter rounds of the trace are padded and cost as much; longer ones raise
    an error. `reschedule` makes traces with full rounds. If nothing is drafted before prefill, the token of the
    prefill is part of the prompt here. A last round drafts no further than its row goes. Graphs of all batch sizes are
    captured before time is measured; `prefill_seconds` of the stats end with the first round of a batch, whose tokens
    count as prefill.
    Raises ValueError as `replay` does, for rounds that do not fit, and for models without a device decoder.
    """
    return replayed(_Captured, model, trace, levels, batch_size, max_new_tokens, rows, speculation_config, name)


class _Captured(ReplayedChain):
    """One captured chain, in which every batch of a replay runs."""

    fused_rounds = True

    def __init__(self, model: PreTrainedModel, trace: Trace, levels: list, config: SpeculationConfig,
                 max_new_tokens: int | None, batch_size: int):
        super().__init__(model, trace, levels, config, max_new_tokens, batch_size)
        self.chain = self._chain()
        try:
            found = round_levels(self.chain.target, self.chain.drafter, num_draft_tokens=self.chain.num_draft_tokens,
                                 batch=batch_size, longest=self.capacity)
            if lookup := next((level for level in found if isinstance(level, LookupLevel)), None):
                raise NotCaptured(f"level {lookup.name} drafts what its rows say, not what a trace asks for")
        except NotCaptured as error:
            raise ValueError(
                f"these rounds cannot be captured: {error}; replay them step by step (hf_mlspec.evaluation.replay)"
            ) from error
        lines = [_verdicts(row, len(trace.levels)) for row in trace.rows]
        self.rounds = max((len(line) for row in lines for line in row), default=0)
        bucket = bucket_of(batch_size)
        self.captured = CapturedChain(found, (), bucket, up_to_growth(self.capacity + 1), script_rounds=self.rounds)
        for number, row in enumerate(trace.rows):
            self._check_shapes(number, row)
        with torch.inference_mode():
            for fewer in sorted({size for size in (*BUCKETS, bucket) if size <= bucket}, reverse=True):
                self.captured.graphs.capture(self.captured.program, fewer)
        self.captured.captured_before = self.captured.graphs.capture_seconds

    def batch(self, rows: Sequence[TracedRow], result: ReplayResult) -> None:
        """Decode one batch from its prompts to the end of its last row, and add what it took."""
        heads = [_read_with_prompt(row) for row in rows]
        budgets = [min(row.new_tokens, self.most) - head for row, head in zip(rows, heads, strict=True)]
        going = [r for r, budget in enumerate(budgets) if budget > 0]
        if not going:
            return
        prompts = self._prompts(rows, heads)
        adopt(self.captured, self.chain.target, self.chain.drafter, len(going))
        script = self._script([rows[r] for r in going])
        rounds = CapturedRounds(self.captured, self.chain.target, self.chain.drafter, script=script)
        loop = Loop(rounds)
        try:
            with torch.inference_mode():
                self._run(loop, [prompts[r] for r in going], [budgets[r] for r in going], result)
        finally:
            self.captured.finish()
        accumulate(result.stats, self.chain.finish(loop.stats))

    def _run(self, loop: Loop, rows: list[list[int]], budgets: list[int], result: ReplayResult) -> None:
        """Round by round; the first one waits for the prompts to be read, so that decoding is what comes after it."""
        begin = time.perf_counter()
        loop.start(rows, budgets)
        going, stats = loop.round(), loop.stats
        stats.prefill_seconds, stats.prefill_tokens = time.perf_counter() - begin, stats.new_tokens
        while going:
            loop.select(going)
            going = loop.round()
        stats.seconds = time.perf_counter() - begin
        result.seconds += stats.seconds

    def _script(self, rows: Sequence[TracedRow]) -> Tensor | None:
        """int32 `[levels, rows, rounds, 2]`, (0, 0) behind the last round; None for the target alone."""
        if not self.trace.levels:
            return None
        script = torch.zeros(len(self.trace.levels), len(rows), self.rounds, 2, dtype=torch.int32)
        for at, row in enumerate(rows):
            for level, line in enumerate(_verdicts(row, len(self.trace.levels))):
                if line:
                    script[level, at, : len(line)] = torch.tensor([round[:2] for round in line], dtype=torch.int32)
        return script

    def _check_shapes(self, number: int, row: TracedRow) -> None:
        """ValueError for a round of the trace that is larger than the captured ones."""
        program = self.captured.program
        for depth, line in enumerate(_verdicts(row, len(self.trace.levels))):
            most = program.handed_up(depth + 1)
            repeats = self.captured.levels[depth + 1].most
            for round in line:
                if round.drafted > most or (round.inner and len(round.inner) > repeats):
                    raise ValueError(
                        f"row {number} of the trace has a round of {round.drafted} drafted tokens in "
                        f"{len(round.inner)} inner rounds, and those captured here hold {most} in {repeats}: "
                        "reschedule the trace (hf_mlspec.evaluation.reschedule)"
                    )


def _read_with_prompt(row: TracedRow) -> int:
    """Tokens that the pass over the prompt wrote before anything was drafted: 1 or 0."""
    return int(row.rounds[0].drafted == 0)


def _verdicts(row: TracedRow, levels: int) -> list[list[Round]]:
    """Per level that checks, the target first, its rounds in the order in which they come."""
    rounds = row.rounds[_read_with_prompt(row) :]
    return [list(rounds_at(iter(rounds), level)) for level in range(levels)]
