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
# (row numbers, the tokens that counted, the verdict they came from, their indices in its batch)
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

    budgets: tokens each row may still gain. num_draft_tokens: the most a draft may hold. cached: leading tokens of a
        single
    row whose keys and values the target's cache already holds.
    """
    begin = time.perf_counter()
    stats = SpeculationStats()
    if drafter:
        drafter.start(len(rows), device)
    target.runner.lengths = [cached] * len(rows)
    numbers, ends = list(range(len(rows))), [len(row) + b for row, b in zip(rows, budgets, strict=True)]
    active = list(rows)
    # A level that writes into the target's cache needs the prompt there first; others draft before the target's
    # prefill.
    ready = drafter is not None and not getattr(drafter, "follows", False)
    while active:
        limits = [min(num_draft_tokens, end - len(row) - 1) for row, end in zip(active, ends, strict=True)]
        draft = drafter.propose(active, limits) if ready else _no_draft(active, device)
        verdict = target.check(active, draft)
        stats.target_passes += 1
        stats.row_passes += len(active)
        if drafter and ready:
            drafter.stats.settle(draft.lengths, verdict.accepted)
            drafter.rollback([len(row) + a for row, a in zip(active, verdict.accepted, strict=True)])
        ready = drafter is not None
        going = _keep(numbers, active, ends, verdict, stop, emit, stats)
        if len(going) < len(active):
            active, numbers, ends = ([line[r] for r in going] for line in (active, numbers, ends))
            if active:
                target.select(going)
                if drafter:
                    drafter.select(going)
    stats.seconds, stats.target_seconds = time.perf_counter() - begin, target.runner.seconds
    return stats


def _keep(
    numbers: list[int],
    active: Rows,
    ends: list[int],
    verdict: Verdict,
    stop: Stop,
    emit: Emit,
    stats: SpeculationStats,
) -> list[int]:
    """Append what counts of every row's settled tokens; the indices of the rows that go on."""
    going, kept = [], []
    for r, (number, row, tokens) in enumerate(zip(numbers, active, verdict.tokens, strict=True)):
        count, finished = stop(number, row, tokens[: ends[r] - len(row)])
        kept.append(tokens[:count])
        row += tokens[:count]
        if not finished and len(row) < ends[r]:
            going.append(r)
    stats.new_tokens += sum(map(len, kept))
    emit(numbers, kept, verdict)
    return going


def _no_draft(rows: Rows, device: torch.device) -> Draft:
    return Draft.from_lists([[] for _ in rows], device)
