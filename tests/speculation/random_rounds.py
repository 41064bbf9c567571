"""Rounds of propose, check and roll back as a chain above a drafter plays them, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_mlspec.speculation.draft import Drafter, Rows

CPU = torch.device("cpu")


@dataclass
class Plan:
    """seed: of every choice. vocab: ids are below it. tentative: levels between check before the level above does."""

    seed: int
    batch: int
    rounds: int
    vocab: int
    tentative: bool = True


def proposals(drafter: Drafter, rows: Rows, limits: list[int]) -> Rows:
    """What a drafter proposes, as lists; checks that the draft keeps the protocol."""
    before = [list(row) for row in rows]
    draft = drafter.propose(rows, limits)
    assert rows == before
    assert all(0 <= n <= limit for n, limit in zip(draft.lengths, limits, strict=True))
    assert draft.tokens.dtype == torch.int64
    assert draft.tokens.shape[0] == len(rows)
    return [tokens[:n] for tokens, n in zip(draft.tokens.tolist(), draft.lengths, strict=True)]


def play(drafter: Drafter, plan: Plan, check: Callable[[Rows, list[int], Rows], None],
         word: Callable[[random.Random], int] | None = None) -> None:
    """Play a plan; `check(rows, limits, proposed)` sees every call. word: draws a token (default: any id)."""
    rng = random.Random(plan.seed)
    word = word or (lambda rng: rng.randrange(plan.vocab))
    rows = [[word(rng) for _ in range(rng.randrange(1, 12))] for _ in range(plan.batch)]
    drafter.start(plan.batch, CPU)
    for _ in range(plan.rounds):
        settled = [len(row) for row in rows]
        for _ in range(rng.randrange(1, 4) if plan.tentative else 1):
            limits = [rng.randrange(0, 6) for _ in rows]
            proposed = proposals(drafter, rows, limits)
            check(rows, limits, proposed)
            accepted = [rng.randrange(len(line) + 1) for line in proposed]
            drafter.rollback([len(row) + a for row, a in zip(rows, accepted, strict=True)])
            for row, line, a in zip(rows, proposed, accepted, strict=True):
                row += [*line[:a], word(rng)]
        if plan.tentative:  # the level above keeps a part of what the level between settled
            kept = [rng.randrange(low, len(row) + 1) for low, row in zip(settled, rows, strict=True)]
            drafter.rollback(kept)
            for row, n in zip(rows, kept, strict=True):
                row[n:] = [word(rng)]
        if len(rows) > 1 and rng.random() < 0.1:
            keep = sorted(rng.sample(range(len(rows)), len(rows) - 1))
            drafter.select(keep)
            rows = [rows[r] for r in keep]
