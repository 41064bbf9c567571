"""The loop: propose, score, accept, roll back, until every row has stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .checker import Checker, Verdict
from .draft import Draft, Drafter, Rows
from .stats import SpeculationStats

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
    begin, stats = time.perf_counter(), SpeculationStats()
    if drafter:
        drafter.start(len(rows), device)
    target.runner.lengths = [cached] * len(rows)
    active = _Active(rows, budgets)
    # A level that writes into the target's cache needs the prompt there first; others draft before the prefill.
    ready = drafter is not None and not getattr(drafter, "follows", False)
    while active.rows:
        draft = drafter.propose(active.rows, active.limits(num_draft_tokens)) if ready else active.no_draft(device)
        verdict = target.check(active.rows, draft)
        stats.count_pass(len(active.rows))
        if ready:
            drafter.stats.settle(draft.lengths, verdict.accepted)
            drafter.rollback([len(row) + a for row, a in zip(active.rows, verdict.accepted, strict=True)])
        ready = drafter is not None
        going = active.settle(verdict, stop, emit, stats)
        stats.settled(time.perf_counter() - begin, target.runner.seconds)
        if len(going) < len(active.rows):
            active.select(going)
            for level in filter(None, (target, drafter) if going else ()):
                level.select(going)
    stats.seconds, stats.target_seconds = time.perf_counter() - begin, target.runner.seconds
    return stats


class _Active:
    """The rows that have not stopped: their numbers in the batch, their tokens, and the length each may reach."""

    def __init__(self, rows: Rows, budgets: list[int]):
        self.rows, self.numbers = list(rows), list(range(len(rows)))
        self.ends = [len(row) + budget for row, budget in zip(rows, budgets, strict=True)]

    def limits(self, num_draft_tokens: int) -> list[int]:
        """Tokens worth drafting: a check adds one more."""
        return [min(num_draft_tokens, end - len(row) - 1) for row, end in zip(self.rows, self.ends, strict=True)]

    def no_draft(self, device: torch.device) -> Draft:
        return Draft.from_lists([[] for _ in self.rows], device)

    def settle(self, verdict: Verdict, stop: Stop, emit: Emit, stats: SpeculationStats) -> list[int]:
        """Append what counts of every row's settled tokens; the indices of the rows that go on."""
        going, kept = [], []
        for r, (row, tokens) in enumerate(zip(self.rows, verdict.tokens, strict=True)):
            count, finished = stop(self.numbers[r], row, tokens[: self.ends[r] - len(row)])
            kept.append(tokens[:count])
            row += tokens[:count]
            if not finished and len(row) < self.ends[r]:
                going.append(r)
        stats.new_tokens += sum(map(len, kept))
        emit(self.numbers, kept, verdict)
        return going

    def select(self, keep: list[int]) -> None:
        self.rows, self.numbers, self.ends = ([line[r] for r in keep] for line in (self.rows, self.numbers, self.ends))
