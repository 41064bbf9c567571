"""How does a drafter whose guesses were checked become a drafter again? So that chains may have any depth.

ML-SpecQD, section 3: the quantized draft of the target is itself sped up by a smaller draft, and so on recursively.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...engines.engine import Engine
from ...nn.state import say_once
from ..checker import Checker, Verdict, catch_up, nan_error, roll_back
from ..draft import Draft, Drafter, Rows
from ..stats import LevelStats
from .cross_tokenizer import CrossTokenizerDrafter
from .model import ModelDrafter


class CheckedDrafter:
    """Drafts with `inner`, checks each round with `checker`, and proposes all tokens that the checker committed.

    num_draft_tokens: how many tokens `inner` may draft before a check; 0: the checker's model drafts without it.
    left_out: `inner` drafts in place of this level, for the level above it.
    on_check: called for every row of every check of `inner`, with what it was asked for, drafted, and had accepted;
        None: no callback. These three may change from one proposal to the next.
    threshold:        drafting ends after a committed token whose probability under the checker is below it (0: never).
    max_positions:    tokens the checker can attend to; the level drafts nothing for longer rows, with one warning.
    scored_by:     the engine of the level above, if that checks greedily: it scores the proposal in the same call.
    The proposed tokens, corrections included, are those the checker itself takes (invariant 1).
    """

    def __init__(
        self,
        checker: Checker,
        inner: Drafter,
        *,
        num_draft_tokens: int,
        threshold: float = 0.0,
        max_positions: int | None = None,
    ):
        self.checker, self.inner = checker, inner
        self.num_draft_tokens, self.threshold = num_draft_tokens, threshold
        self.max_positions = max_positions
        self.scored_by: Engine | None = None
        self.left_out = False
        self.on_check: Callable[[int, int, int], None] | None = None
        self.name = checker.name
        self.stats = LevelStats(self.name)

    @property
    def follows(self) -> bool:
        """Whether this level writes into its checker's cache."""
        return self.checker.runner.follow is not None

    def start(self, batch: int, device: torch.device) -> None:
        self.stats.reset()
        self.checker.start(batch, device)
        self.inner.start(batch, device)

    def select(self, keep: list[int]) -> None:
        self.checker.select(keep)
        self.inner.select(keep)

    def admit(self, count: int) -> None:
        self.checker.admit(count)
        self.inner.admit(count)

    def replace(self, row: int) -> None:
        self.checker.replace(row)
        self.inner.replace(row)

    def rollback(self, lengths: list[int]) -> None:
        roll_back(self.checker.runner, lengths)
        self.inner.rollback(lengths)

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        catch_up(self.checker.runner)
        if self.left_out:
            return self.inner.propose(rows, limits)
        self.stats.rounds += 1
        limits = self._rested(rows, limits)
        if self._runs_in_engine(rows, limits):
            return self._propose_in_engine(rows, limits)
        settled: Rows = [[] for _ in rows]
        alive = [limit > 0 for limit in limits]
        seen = [list(row) for row in rows]
        while any(alive):
            verdict = self._round(seen, self._room(limits, settled, alive), alive)
            for r, tokens in enumerate(verdict.tokens):
                if alive[r]:
                    settled[r] += tokens
                    seen[r] += tokens
            confident = self._confident(verdict)
            alive = [
                a and ok and len(done) < limit
                for a, ok, done, limit in zip(alive, confident, settled, limits, strict=True)
            ]
        self.stats.forwards, self.stats.seconds = self.checker.runner.forwards, self.checker.runner.seconds
        return Draft.from_lists(settled, self.checker.runner.device)

    def _runs_in_engine(self, rows: Rows, limits: list[int]) -> bool:
        """Whether the engines of both levels decide greedily themselves: then all rounds are one call."""
        inner = self.inner
        if not self.checker.in_engine or not any(limits):
            return False
        return not self.num_draft_tokens or (
            isinstance(inner, ModelDrafter)
            and inner.runner.can.greedy_rounds
            and inner.in_engine
            and inner.whole(rows, limits)
        )

    def _propose_in_engine(self, rows: Rows, limits: list[int]) -> Draft:
        inner, runner = self.inner, self.checker.runner
        if not self.num_draft_tokens:
            return self._proposed(runner.draft(rows, limits, self.threshold))
        catch_up(inner.runner)
        settled, checks, rounds, scores = runner.draft_checked(
            inner.runner,
            rows,
            limits,
            num_draft_tokens=self.num_draft_tokens,
            tiny_threshold=inner.threshold,
            threshold=self.threshold,
            above=self.scored_by,
        )
        draft = self._proposed(settled)
        draft.scores = scores
        inner.settle_in_engine([])
        inner.stats.rounds += rounds
        inner.stats.settle(checks[::2], checks[1::2])
        if self.checker.on_check is not None or self.on_check is not None:
            left = list(limits)
            for drafted, accepted, alive in engine_checks(settled, checks):
                if self.checker.on_check is not None:
                    self.checker.on_check(drafted, accepted, alive)
                self._tell([min(max(n - 1, 0), self.num_draft_tokens) for n in left], drafted, accepted, alive)
                left = [n - a - 1 if on else 0 for n, a, on in zip(left, accepted, alive, strict=True)]
        return draft

    def _proposed(self, tokens: Rows) -> Draft:
        """What the engine made, counted; FloatingPointError if its logits were NaN."""
        runner = self.checker.runner
        if any(-1 in row for row in tokens):
            raise nan_error(f"level {self.name}", runner.dtype)
        self.stats.forwards, self.stats.seconds = runner.forwards, runner.seconds
        return Draft.from_lists(tokens)

    def _tell(self, limits: list[int], drafted: list[int], accepted: list[int], alive: list[bool]) -> None:
        """What `inner` was asked for in a check, and what became of it."""
        if self.on_check is not None:
            for limit, d, a, on in zip(limits, drafted, accepted, alive, strict=True):
                if on:
                    self.on_check(limit, d, a)

    def _room(self, limits: list[int], settled: Rows, alive: list[bool]) -> list[int]:
        """Tokens the inner level may guess: the check adds one more."""
        left = [limit - len(done) - 1 if a else 0 for limit, done, a in zip(limits, settled, alive, strict=True)]
        return [min(max(n, 0), self.num_draft_tokens) for n in left]

    def _rested(self, rows: Rows, limits: list[int]) -> list[int]:
        """No tokens for rows that outgrow the positions of the checker."""
        if self.max_positions is None:
            return limits
        fits = [len(row) + limit <= self.max_positions for row, limit in zip(rows, limits, strict=True)]
        if all(fits):
            return limits
        say_once(
            self.checker.runner.model,
            f"level {self.name} has only {self.max_positions} positions: no drafts for longer rows (warned once)",
        )
        return [limit if ok else 0 for limit, ok in zip(limits, fits, strict=True)]

    def _round(self, seen: Rows, limits: list[int], alive: list[bool]) -> Verdict:
        """One inner round. Rows that are done rest: nothing of theirs is drafted, fed, kept or counted."""
        alone = not self.num_draft_tokens
        draft = self._nothing(seen) if alone else self.inner.propose(seen, limits)
        verdict = self.checker.check(seen, draft, want_confidence=self.threshold > 0, alive=alive)
        if not alone:
            self.inner.rollback([len(row) + a for row, a in zip(seen, verdict.accepted, strict=True)])
            proposer(self.inner).stats.settle(draft.lengths, verdict.accepted)
            self._tell(limits, draft.deepest, verdict.accepted, alive)
        return verdict

    def _nothing(self, rows: Rows) -> Draft:
        return Draft.nothing(len(rows), self.checker.runner.device)

    def _confident(self, verdict: Verdict) -> list[bool]:
        """Per row: was every token settled in this round at least as probable as the threshold?"""
        if self.threshold <= 0:
            return [True] * len(verdict.tokens)
        if verdict.confidence is not None:
            lines = zip(verdict.confidence, verdict.tokens, strict=True)
            return [min(line[: len(tokens)], default=1.0) >= self.threshold for line, tokens in lines]
        probs = self.checker.sampler.probabilities(verdict.scores)
        tokens = Draft.from_lists(verdict.tokens, probs.device)
        width = tokens.tokens.shape[1]
        each = probs[:, :width].gather(2, tokens.tokens[..., None])[..., 0].tolist()
        return [min(line[:n], default=1.0) >= self.threshold for line, n in zip(each, tokens.lengths, strict=True)]


def proposer(drafter: Drafter) -> Drafter:
    """Who drafts what this level hands up: itself, or where it is left out a level below."""
    checked = getattr(drafter, "inner", None) if isinstance(drafter, CrossTokenizerDrafter) else drafter
    return proposer(checked.inner) if isinstance(checked, CheckedDrafter) and checked.left_out else drafter


def engine_checks(settled: Rows, checks: list[int]) -> Iterator[tuple[list[int], list[int], list[bool]]]:
    """The rounds inside one call of an engine, in the form of `OnCheck`.

    checks: (drafted, accepted) of every row and round, concatenated; a row takes part until its committed tokens, one
    more than it accepted in each round, are all that was proposed.
    """
    pairs = iter(zip(checks[::2], checks[1::2], strict=True))
    left = [len(row) for row in settled]
    while any(left):
        alive = [count > 0 for count in left]
        found = [next(pairs) if on else (0, 0) for on in alive]
        drafted, accepted = (list(column) for column in zip(*found, strict=True))
        yield drafted, accepted, alive
        left = [count - a - 1 if on else 0 for count, a, on in zip(left, accepted, alive, strict=True)]
