"""The loop: propose, score, accept, roll back, until every row has stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .checker import Checker, Verdict
from .draft import Draft, Drafter, Rows
from .drafters.agreement import common_prefix
from .stats import LevelStats, SpeculationStats

# (row number, row before, settled tokens) -> (how many of them count, whether the row is finished)
Stop = Callable[[int, list[int], list[int]], tuple[int, bool]]
# (row numbers, the tokens that counted, the verdict they came from)
Emit = Callable[[list[int], Rows, Verdict], None]


def decode(
    target: Checker,
    drafter: Drafter | None,
    rows: Rows,
    budgets: list[int],
    *,
    num_draft_tokens: int,
    stop: Stop,
    emit: Emit,
    device: torch.device,
    cached: int = 0,
) -> SpeculationStats:
    """Extend every row until `stop` says so; `rows` grow in place.

    budgets: tokens each row may still gain. num_draft_tokens: the most a draft may hold. cached: leading tokens of
    a single row whose keys and values the target's cache, started by the caller, already holds.
    """
    loop = Decoding(target, drafter, num_draft_tokens=num_draft_tokens, stop=stop, emit=emit, device=device)
    return decode_all(loop, rows, budgets, cached)


def decode_all(loop: Decoding, rows: Rows, budgets: list[int], cached: int = 0) -> SpeculationStats:
    """`decode` by a loop that holds no rows yet."""
    loop.start(rows, budgets, cached)
    while going := loop.round():
        loop.select(going)
    return loop.stats


class Decoding:
    """The rows a chain is working on: they join, gain tokens round by round, and leave.

    rows, numbers, ends: of every row its tokens, the number that `stop` and `emit` know it by, and the length it may
    reach. drafted: tokens drafted for each row in the last round.
    """

    def __init__(
        self,
        target: Checker,
        drafter: Drafter | None,
        *,
        num_draft_tokens: int,
        stop: Stop,
        emit: Emit,
        device: torch.device,
    ):
        self.target, self.drafter, self.num_draft_tokens = target, drafter, num_draft_tokens
        self.stop, self.emit, self.device = stop, emit, device
        self.rows: Rows = []
        self.numbers: list[int] = []
        self.ends: list[int] = []
        self.drafted: list[int] = []
        self.stats = SpeculationStats()
        # A level that writes into the target's cache needs the prompt there first; others draft before the prefill.
        self._waits = bool(getattr(drafter, "follows", False))
        self._ready: list[bool] = []

    def start(self, rows: Rows, budgets: list[int], cached: int = 0) -> None:
        """These rows from the beginning, in a cache of the target's that the caller started; see `decode`."""
        begin = time.perf_counter()
        if self.drafter:
            self.drafter.start(len(rows), self.device)
        self.target.runner.lengths = [cached] * len(rows)
        for number, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
            self._append(row, budget, number)
        self.stats.seconds += time.perf_counter() - begin

    def admit(self, rows: Rows, budgets: list[int], numbers: list[int]) -> None:
        """These rows join behind the others; the next round prefills them while the others are checked."""
        for level in self._levels():
            level.admit(len(rows))
        for row, budget, number in zip(rows, budgets, numbers, strict=True):
            self._append(row, budget, number)

    def replace(self, r: int, row: list[int], budget: int, number: int) -> None:
        """Another row takes the place, and the slots of the caches, of row r, which ended.

        What both begin with, such as the examples of a few-shot prompt, stays in the cache of a compiled target: it
        would write the same bits again (law 3).
        """
        runner = self.target.runner
        common = min(runner.lengths[r], common_prefix(self.rows[r], row)) if runner.can.bit_exact else 0
        for level in self._levels():
            level.replace(r)
        runner.lengths[r] = common
        self.rows[r], self.numbers[r], self.ends[r] = row, number, len(row) + budget
        self._ready[r] = not self._waits

    def select(self, keep: list[int]) -> None:
        """Go on with the rows of these indices only, in this order."""
        if keep == list(range(len(self.rows))):
            return
        for level in self._levels():
            level.select(keep)
        lines = self.rows, self.numbers, self.ends, self._ready
        self.rows, self.numbers, self.ends, self._ready = ([line[r] for r in keep] for line in lines)

    def round(self) -> list[int]:
        """Propose, score, accept, roll back; the indices of the rows that have not stopped."""
        begin = time.perf_counter()
        proposes = self.drafter is not None and any(self._ready)
        draft = self.drafter.propose(self.rows, self._limits()) if proposes else self._no_draft()
        verdict = self.target.check(self.rows, draft)
        self.drafted = draft.lengths
        self.stats.count_pass(len(self.rows))
        if proposes:
            self.drafter.stats.settle(draft.lengths, verdict.accepted)
            self.drafter.rollback([len(row) + a for row, a in zip(self.rows, verdict.accepted, strict=True)])
        self._ready = [True] * len(self.rows)
        going = self._settle(verdict)
        self.stats.seconds += time.perf_counter() - begin
        self.stats.target_seconds = self.target.runner.seconds
        drafting = self.drafter.stats.seconds if self.drafter else 0.0
        self.stats.settled(self.stats.seconds, self.stats.target_seconds, drafting)
        if self.stats.target_passes == 1:
            self._settle_prefill()
        return going

    def _settle_prefill(self) -> None:
        """What the levels spent so far is no part of decoding."""
        level = self.drafter
        while isinstance(stats := getattr(level, "stats", None), LevelStats):
            stats.prefill_seconds = stats.seconds
            level = getattr(level, "inner", None)

    def _append(self, row: list[int], budget: int, number: int) -> None:
        self.rows.append(row)
        self.numbers.append(number)
        self.ends.append(len(row) + budget)
        self._ready.append(not self._waits)

    def _levels(self) -> list[Checker | Drafter]:
        """From the target down: who follows a cache is told after its owner."""
        return [self.target] if self.drafter is None else [self.target, self.drafter]

    def _limits(self) -> list[int]:
        """Tokens worth drafting: a check adds one more."""
        most = self.num_draft_tokens
        lines = zip(self.rows, self.ends, self._ready, strict=True)
        return [min(most, end - len(row) - 1) if ready else 0 for row, end, ready in lines]

    def _no_draft(self) -> Draft:
        return Draft.from_lists([[] for _ in self.rows], self.device)

    def _settle(self, verdict: Verdict) -> list[int]:
        """Append what counts of every row's settled tokens; the indices of the rows that go on."""
        going, kept = [], []
        for r, (row, tokens) in enumerate(zip(self.rows, verdict.tokens, strict=True)):
            count, finished = self.stop(self.numbers[r], row, tokens[: self.ends[r] - len(row)])
            kept.append(tokens[:count])
            row += tokens[:count]
            if not finished and len(row) < self.ends[r]:
                going.append(r)
        self.stats.new_tokens += sum(map(len, kept))
        self._before_emit(going)
        self.emit(self.numbers, kept, verdict)
        return going

    def _before_emit(self, going: list[int]) -> None:
        """The rows have grown, and nobody has been told yet."""
