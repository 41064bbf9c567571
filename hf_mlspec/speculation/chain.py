"""How does a drafter whose guesses were checked become a drafter again? So that chains may have any depth.

ML-SpecQD, section 3: the quantized draft of the target is itself sped up by a smaller draft, and so on recursively.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..engines.engine import Engine
from ..engines.rows import held_bytes
from ..nn.state import say_once
from .checker import Checker, Verdict, catch_up, nan_error, roll_back
from .draft import Draft, Drafter, Rows
from .drafters.model import ModelDrafter
from .loop import Emit, Loop, Stop
from .rounds.host import HostRounds
from .sampling import Sampler
from .stats import LevelStats, SpeculationStats


class CheckedDrafter:
    """Drafts with `inner`, checks each round with `checker`, and proposes all tokens that the checker committed.

    num_draft_tokens: how many tokens `inner` may draft before a check.
    threshold:        drafting ends after a committed token whose probability under the checker is below it (0: never).
    max_positions:    tokens the checker can attend to; the level drafts nothing for longer rows, with one warning.
    scored_by:     the engine of the level above, if that checks greedily: it scores the proposal in the same call.
    The proposed tokens, corrections included, follow the checker's own distribution, which is in Draft.probs
    (invariant 1).
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
        self.stats.rounds += 1
        limits = self._rested(rows, limits)
        if self._runs_in_engine(rows, limits):
            return self._propose_in_engine(rows, limits)
        settled: Rows = [[] for _ in rows]
        probs: list[Tensor] = []  # rounds of [batch, 1 + k, vocab]
        alive = [limit > 0 for limit in limits]
        seen = [list(row) for row in rows]
        places: list[list[int]] = [[] for _ in rows]  # per row and settled token: its column in all of probs
        columns = 0
        while any(alive):
            verdict = self._round(seen, self._room(limits, settled, alive), alive)
            for r, tokens in enumerate(verdict.tokens):
                if alive[r]:
                    settled[r] += tokens
                    seen[r] += tokens
                    places[r] += range(columns, columns + len(tokens))
            if verdict.probs is not None:
                probs.append(verdict.probs)
                columns += verdict.probs.shape[1]
            confident = self._confident(verdict)
            alive = [
                a and ok and len(done) < limit
                for a, ok, done, limit in zip(alive, confident, settled, limits, strict=True)
            ]
        self.stats.forwards, self.stats.seconds = self.checker.runner.forwards, self.checker.runner.seconds
        draft = Draft.from_lists(settled, self.checker.runner.device)
        draft.probs = _gather(probs, places, draft) if probs else None
        return draft

    def _runs_in_engine(self, rows: Rows, limits: list[int]) -> bool:
        """Whether the engines of both levels decide greedily themselves: then all rounds are one call."""
        inner = self.inner
        return (
            self.checker.in_engine
            and isinstance(inner, ModelDrafter)
            and inner.in_engine
            and any(limits)
            and inner.whole(rows, limits)
        )

    def _propose_in_engine(self, rows: Rows, limits: list[int]) -> Draft:
        inner, runner = self.inner, self.checker.runner
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
        if any(-1 in row for row in settled):
            raise nan_error(f"level {self.name}", runner.dtype)
        inner.settle_in_engine([])
        inner.stats.rounds += rounds
        inner.stats.settle(checks[::2], checks[1::2])
        if self.checker.on_check is not None:
            for check in engine_checks(settled, checks):
                self.checker.on_check(*check)
        self.stats.forwards, self.stats.seconds = runner.forwards, runner.seconds
        draft = Draft.from_lists(settled)
        draft.scores = scores
        return draft

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
        draft = self.inner.propose(seen, limits)
        verdict = self.checker.check(seen, draft, want_confidence=self.threshold > 0, alive=alive)
        self.inner.rollback([len(row) + a for row, a in zip(seen, verdict.accepted, strict=True)])
        self.inner.stats.settle(draft.lengths, verdict.accepted)
        return verdict

    def _confident(self, verdict: Verdict) -> list[bool]:
        """Per row: was every token settled in this round at least as probable as the threshold?"""
        if self.threshold <= 0:
            return [True] * len(verdict.tokens)
        if verdict.confidence is not None:
            lines = zip(verdict.confidence, verdict.tokens, strict=True)
            return [min(line[: len(tokens)], default=1.0) >= self.threshold for line, tokens in lines]
        probs = self.checker.sampler.probabilities(verdict.scores) if verdict.probs is None else verdict.probs
        tokens = Draft.from_lists(verdict.tokens, probs.device)
        width = tokens.tokens.shape[1]
        each = probs[:, :width].gather(2, tokens.tokens[..., None])[..., 0].tolist()
        return [min(line[:n], default=1.0) >= self.threshold for line, n in zip(each, tokens.lengths, strict=True)]


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


def _gather(probs: list[Tensor], places: list[list[int]], draft: Draft) -> Tensor:
    """The checker's distribution behind every settled token: float32 `[batch, k, vocab]`.

    places: per row and settled token its column in the rounds laid side by side.
    """
    columns = Draft.from_lists(places, draft.tokens.device).tokens
    return torch.cat(probs, dim=1).gather(1, columns[..., None].expand(-1, -1, probs[0].shape[-1]))


@dataclass
class Part:
    """What one level of a chain is made of, the target or one below it.

    engine, sampler: of a level with a model; the sampler is made when the chain is. drafter: instead, a lookup that is
    ready. num_draft_tokens: the most it drafts before the level above checks. across: makes of its drafter one in the
    vocabulary of the level above, None where both speak the same.
    """

    name: str
    engine: Engine | None = None
    sampler: Callable[[], Sampler] | None = None
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    threshold: float = 0.0
    max_positions: int | None = None
    across: Callable[[Drafter], Drafter] | None = None


@dataclass
class Chain:
    """A target and the levels below it, ready to decode.

    levels: the outermost drafter of each level, from the target down. runners: their engines, None for lookups.
    models: those whose attention has to be switched while target and levels run.
    """

    target: Checker
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    levels: list[Drafter] = field(default_factory=list)
    runners: list[Engine | None] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)

    @classmethod
    def of(cls, target: Part, parts: list[Part], *, keep_logits: bool) -> Chain:
        """The chain of these levels, from the one below the target down."""
        chain = cls(Checker(target.engine, target.sampler(), target.name, keep_logits=keep_logits))
        for part in reversed(parts):
            chain.drafter = _drafter(part, chain.drafter, chain.num_draft_tokens)
            chain.num_draft_tokens = part.num_draft_tokens
            chain.levels.insert(0, chain.drafter)
            chain.runners.insert(0, part.engine)
        engines = [one.engine for one in (target, *parts) if one.engine is not None]
        chain.models = [engine.model for engine in engines if engine.can.by_module]
        return chain

    def host_rounds(self, device: torch.device) -> HostRounds:
        """Rounds of this chain on the host, drafts on `device`."""
        return HostRounds(self.target, self.drafter, num_draft_tokens=self.num_draft_tokens, device=device)

    def decode(
        self,
        rows: Rows,
        budgets: list[int],
        *,
        device: torch.device,
        stop: Stop | None,
        emit: Emit | None,
        ends: frozenset[int],
    ) -> SpeculationStats:
        """Start anew and extend every row to its end, in rounds of the host; see `Loop`."""
        self.target.start(len(rows), device)
        loop = Loop(self.host_rounds(device), stop=stop, emit=emit, ends=ends)
        return self.finish(loop.decode(rows, budgets))

    def finish(self, stats: SpeculationStats) -> SpeculationStats:
        """Put what the levels counted, and the memory of every cache, into the counts of the loop."""
        stats.levels = [replace(level.stats) for level in self.levels]  # kept drafters count anew next time
        stats.target_cache_bytes, *held = held_bytes([self.target.runner, *self.runners])
        for level, count in zip(stats.levels, held, strict=True):
            level.cache_bytes = count
        return stats


def _drafter(part: Part, inner: Drafter | None, num_draft_tokens: int) -> Drafter:
    """The drafter of a level over that of the level below it, which drafts so many tokens before a check."""
    if part.drafter is not None:
        return part.drafter
    limits = {"threshold": part.threshold, "max_positions": part.max_positions}
    if inner is None:
        made = ModelDrafter(part.engine, part.sampler(), part.name, **limits)
    else:
        checker = Checker(part.engine, part.sampler(), part.name, keep_logits=False)
        made = CheckedDrafter(checker, inner, num_draft_tokens=num_draft_tokens, **limits)
    return made if part.across is None else part.across(made)
