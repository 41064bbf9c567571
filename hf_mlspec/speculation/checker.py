"""Given a draft, which tokens does one level settle? A runner scores, a sampler reads, acceptance decides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .acceptance import accept_greedy, accept_sampled
from .draft import Draft, Rows
from .runner import Runner
from .sampling import Sampler


@dataclass
class Verdict:
    """What a check settled.

    tokens:   per row the accepted drafted tokens and the one the checker put after them (so at least one).
    accepted: per row how many of them were drafted.
    probs:    float32 `[batch, k + 1, vocab]`, the checker's distribution at each settled position; None when greedy.
    logits, scores: float32 `[batch, k + 1, vocab]` before and after the logits processors.
    """

    tokens: Rows
    accepted: list[int]
    probs: Tensor | None
    logits: Tensor
    scores: Tensor


class Checker:
    """A level that can judge: the target of `decode`, and the upper half of every `CheckedDrafter`."""

    def __init__(self, runner: Runner, sampler: Sampler, name: str):
        self.runner, self.sampler, self.name = runner, sampler, name

    def start(self, batch: int, device: torch.device) -> None:
        self.runner.start(batch, device)
        self.sampler.start(batch)

    def select(self, keep: list[int]) -> None:
        self.runner.select(keep)
        self.sampler.select(keep)

    def check(self, rows: Rows, draft: Draft) -> Verdict:
        """Score every row with its draft in one forward pass and settle; the cache keeps what turned out true.

        Raises FloatingPointError if the logits hold NaN.
        """
        guess = draft.tokens if draft.tokens.shape[1] else None
        logits = self.runner.feed(rows, guess, draft.lengths)
        scores = self.sampler.scores(logits, rows, guess, draft.lengths)
        settle = self._sampled if self.sampler.do_sample else self._greedy
        columns, probs = settle(draft, scores)  # [batch, 2 + k + 1]: NaN seen, accepted, tokens
        # The one host synchronisation of the check.
        values = columns.tolist()
        if any(line[0] for line in values):
            raise FloatingPointError(
                f"the logits of {self.name} are NaN: its weights hold NaN or Inf, or its arithmetic overflows in "
                f"{logits.dtype}; check the checkpoint, or load it in bfloat16 or float32"
            )
        accepted = [line[1] for line in values]
        tokens = [line[2 : 3 + a] for line, a in zip(values, accepted, strict=True)]
        self.runner.rollback([len(row) + a for row, a in zip(rows, accepted, strict=True)])
        return Verdict(tokens, accepted, probs, logits, scores)

    def _greedy(self, draft: Draft, scores: Tensor) -> tuple[Tensor, None]:
        top, best = scores.max(dim=-1)
        accepted = accept_greedy(draft.tokens, _column(draft, best), best)
        return torch.cat([_nan_seen(top), accepted[:, None], best], dim=1), None

    def _sampled(self, draft: Draft, scores: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.sampler.probabilities(scores)
        batch, width = draft.tokens.shape
        uniforms = torch.rand(batch, width, device=probs.device)
        noise = torch.empty_like(probs[:, 0]).exponential_()
        accepted, after = accept_sampled(draft.tokens, _column(draft, probs), draft.probs, probs, uniforms, noise)
        tokens = torch.cat([draft.tokens, after[:, None]], dim=1).scatter(1, accepted[:, None], after[:, None])
        return torch.cat([_nan_seen(probs[..., 0]), accepted[:, None], tokens], dim=1), probs


def _column(draft: Draft, like: Tensor) -> Tensor:
    return torch.tensor(draft.lengths, device=like.device)


def _nan_seen(values: Tensor) -> Tensor:
    return torch.isnan(values).any(dim=1, keepdim=True).long()
