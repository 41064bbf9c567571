"""What does a model propose, one token after the other?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...engines.engine import Engine, Guess
from ...nn.state import say_once
from ..checker import catch_up, nan_error, roll_back, runner_is_greedy
from ..draft import Draft, Rows
from ..sampling import Sampler
from ..stats import LevelStats


@dataclass
class OuterNoise:
    """The places in its checker's noise of a level that drafts tokens of both vocabularies one to one.

    inner, outer: int64 `[n]`, the same tokens in the level's vocabulary and in the checker's, of `size` tokens; outer
    ascends. lengths: tokens of each row in the checker's vocabulary.
    """

    inner: Tensor
    outer: Tensor
    size: int
    lengths: list[int]

    def lift(self, scores: Tensor) -> Tensor:
        """Scores `[batch, vocab]` of the level over the checker's vocabulary, -inf for tokens it does not draft."""
        lifted = scores.new_full((len(scores), self.size), float("-inf"))
        return lifted.index_copy(1, self.outer, scores[:, self.inner])

    def lower(self, tokens: Tensor) -> Tensor:
        """The level's tokens for those of the checker; one that is not drafted counts as the nearest above."""
        return self.inner[torch.searchsorted(self.outer, tokens).clamp(max=len(self.inner) - 1)]


class ModelDrafter:
    """A causal language model that drafts on its own, in a cache of its own or in its checker's (`runner.follow`).

    threshold:     the draft of a row ends after a token the model gave a smaller probability than this (0: never).
                   The token itself is proposed (invariant 6).
    max_positions: tokens the model can attend to; of a longer row it sees the last ones, with one warning.
    allowed:       bool `[vocab]` or None: the only tokens that may be drafted.
    outer:         whose noise the draws have, or None: that of the level's own tokens.
    """

    def __init__(
        self,
        runner: Engine,
        sampler: Sampler,
        name: str,
        *,
        threshold: float = 0.0,
        max_positions: int | None = None,
    ):
        self.runner, self.sampler, self.name = runner, sampler, name
        self.threshold, self.max_positions = threshold, max_positions
        self.allowed: Tensor | None = None
        self.outer: OuterNoise | None = None
        self.stats = LevelStats(name)

    @property
    def follows(self) -> bool:
        """Whether this level writes into its checker's cache."""
        return self.runner.follow is not None

    def start(self, batch: int, device: torch.device) -> None:
        self.stats.reset()
        self.runner.start(batch, device)
        self.sampler.start(batch)
        self.dropped = [0] * batch  # leading tokens of each row outside the window
        self._fresh = True
        if self.allowed is not None:
            self.allowed = self.allowed.to(device)

    def select(self, keep: list[int]) -> None:
        self.runner.select(keep)
        self.sampler.select(keep)
        self.dropped = [self.dropped[r] for r in keep]

    def admit(self, count: int) -> None:
        self.runner.admit(count)
        self.sampler.admit(count)
        self.dropped += [0] * count

    def replace(self, row: int) -> None:
        self.runner.forget(row)
        self.sampler.replace(row)
        self.dropped[row] = 0

    def rollback(self, lengths: list[int]) -> None:
        roll_back(self.runner, [max(n - d, 0) for n, d in zip(lengths, self.dropped, strict=True)])

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        self.stats.rounds += 1
        catch_up(self.runner)
        if self.max_positions is not None:
            limits = [min(limit, self.max_positions // 2) for limit in limits]
        if not any(limits):
            return Draft.nothing(len(rows), self.runner.device)
        if self.in_engine:
            return self._propose_in_engine(self._window(rows, limits), limits)
        draft = self._draft(rows, limits, self._window(rows, limits))
        self.stats.forwards, self.stats.seconds = self.runner.forwards, self.runner.seconds
        return draft

    @property
    def in_engine(self) -> bool:
        """Whether the engine makes a whole draft in one call."""
        return self.allowed is None and runner_is_greedy(self.runner, self.sampler)

    def _propose_in_engine(self, rows: Rows, limits: list[int]) -> Draft:
        drafted = self.runner.draft(rows, limits, self.threshold)
        self.settle_in_engine(drafted)
        return Draft.from_lists(drafted, self.runner.device)

    def settle_in_engine(self, drafted: Rows) -> None:
        """Count a draft that the engine made; FloatingPointError if its logits were NaN."""
        if any(-1 in row for row in drafted):
            raise nan_error(f"level {self.name}", self.runner.dtype)
        self.stats.forwards, self.stats.seconds = self.runner.forwards, self.runner.seconds

    def whole(self, rows: Rows, limits: list[int]) -> bool:
        """Whether the model sees every row and its draft from the first token on."""
        if self.max_positions is None:
            return True
        longest = max(len(row) + limit for row, limit in zip(rows, limits, strict=True))
        return longest <= self.max_positions and not any(self.dropped)

    def _draft(self, rows: Rows, limits: list[int], seen: Rows) -> Draft:
        """A draft by passes of the engine. seen: what the model sees of the rows."""
        batch = len(rows)
        lengths, alive = [0] * batch, [limit > 0 for limit in limits]
        logits = self._feed(seen, None, alive)
        tokens: list[Tensor] = []  # steps of [batch]
        while True:
            token, confidence = self._draw(self._scores(logits, rows, tokens, alive), rows, len(tokens), alive)
            tokens.append(token)
            sure = (confidence >= self.threshold).tolist() if self.threshold > 0 else [True] * batch
            lengths = [n + a for n, a in zip(lengths, alive, strict=True)]
            alive = [a and ok and n < limit for a, ok, n, limit in zip(alive, sure, lengths, limits, strict=True)]
            if not any(alive):
                break
            logits = self.runner.step(token[:, None], [int(a) for a in alive], [0] * batch, 1)
        return Draft(torch.stack(tokens, dim=1), lengths)

    def _feed(self, seen: Rows, guess: Guess | None, alive: list[bool]) -> Tensor:
        """`Engine.feed`; the first logits since the start are looked at."""
        logits = self.runner.feed(seen, guess, alive)
        if self._fresh:
            self._refuse_nan(logits)
        return logits

    def _draw(self, scores: Tensor, rows: Rows, step: int, alive: list[bool]) -> tuple[Tensor, Tensor]:
        """The tokens of processed scores `[batch, vocab]` behind rows and `step` drafted tokens; their confidence."""
        if self.outer is None or not self.sampler.do_sample:
            return self.sampler.draw(scores, [len(row) + step for row in rows], alive)
        positions = [length + step for length in self.outer.lengths]
        tokens, confidence = self.sampler.draw(self.outer.lift(scores), positions, alive)
        return self.outer.lower(tokens), confidence

    def _scores(self, logits: Tensor, rows: Rows, tokens: list[Tensor], alive: list[bool]) -> Tensor:
        """Processed scores `[batch, vocab]` of the position after row and drafted tokens."""
        if self.allowed is not None:
            logits = self.sampler.fit(logits).masked_fill(~self.allowed, float("-inf"))
        if self.sampler.reads_tokens and tokens:
            drafted = torch.stack(tokens, dim=1).tolist()
            rows = [row + more for row, more in zip(rows, drafted, strict=True)]
        return self.sampler.scores(logits, rows, alive=alive)[:, 0]

    def _window(self, rows: Rows, limits: list[int]) -> Rows:
        """What the model sees of the rows; a row too long restarts at its last half window."""
        if self.max_positions is None:
            return rows
        for r, (row, limit) in enumerate(zip(rows, limits, strict=True)):
            seen = len(row) - self.dropped[r]
            # A rejection may take back more than the window holds.
            if seen < 1 or seen + limit > self.max_positions:
                self.dropped[r] = max(len(row) - max(self.max_positions // 2, 1), 0)
                self.runner.lengths[r] = 0
                say_once(
                    self.runner.model,
                    f"level {self.name} has only {self.max_positions} positions: it drafts from the last tokens of "
                    "longer rows (warned once)",
                )
        return [row[d:] if d else row for row, d in zip(rows, self.dropped, strict=True)]

    def _refuse_nan(self, logits: Tensor) -> None:
        self._fresh = False
        if not bool(torch.isfinite(logits.amax())):
            raise FloatingPointError(
                f"the logits of level {self.name} are NaN or Inf: its weights hold NaN or Inf, or its "
                f"arithmetic overflows in {logits.dtype}; check the checkpoint or its dtype"
            )
