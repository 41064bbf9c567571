"""How are tokens chosen if every row has its own settings and must not depend on other rows?

A row that samples has a seed, and so noise, of its own; sampling.py says what follows from that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..engines.engine import Guess, Rows
from ..engines.trees import END, Parents, path
from .sampling import Process, Sampler, drawn


class RowRule:
    """How the tokens of one row are chosen, at every level with the target's vocabulary.

    seed: of the row's noise; None for a greedy row. warp, process, ends: as for `Sampler`; process gets row number 0.
    temperature: what warp divides scores by, 1 where there is none; None where it does anything else.
    error: why the target cannot choose token number `failed_at` (a processor of the row raised, or its logits are
        NaN): that token and later ones mean nothing. If earlier tokens of the draft are rejected, the error does not
        matter.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        prompt_length: int,
        seed: int | None = None,
        warp: Callable[[Tensor], Tensor] | None = None,
        process: Process | None = None,
        ends: frozenset[int] = frozenset(),
        temperature: float | None = None,
    ):
        self.seed, self.temperature = seed, temperature
        self.error: Exception | None = None
        self.failures: dict[int, Exception] = {}  # in the last tree, by the number of the token that was asked for
        self.failed_at = 0
        self.sampler = Sampler(vocab_size, warp=warp, process=process, prompt_lengths=[prompt_length], ends=ends)
        self.sampler.start(1)

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the argmax of the logits as they come."""
        return self.seed is None and self.sampler.is_greedy

    @property
    def is_plain(self) -> bool:
        """Whether the row takes the largest logit, or the largest sum of one over a temperature and noise: nothing
        that captured rounds cannot do."""
        return self.sampler.is_greedy or (self.seed is not None and self.temperature is not None)

    def scores(self, scores: Tensor, row: list[int], guess: Guess | None, judges: bool) -> Tensor:
        """Float32 `[k + 1, vocab]` -> processed; guess: of this one row. judges: it is the target that asks."""
        if self.sampler.is_greedy:
            return scores
        self.error, self.failures = None if judges else self.error, {}
        try:
            return self.sampler.scores(scores[None], [row], guess)[0]
        except Exception:  # the row's own code, which ends this row only, and only if the failing token is reached
            if guess is not None and guess.parents is not None:
                return self._node_by_node(scores.clone(), row, guess)
            return self._one_by_one(scores.clone(), row + (guess.tokens[0].tolist() if guess else []), judges)

    def _one_by_one(self, scores: Tensor, tokens: list[int], judges: bool) -> Tensor:
        """Scores processed up to the position where a processor fails; `tokens` are the row and its guesses."""
        first = len(tokens) + 1 - len(scores)
        for j, line in enumerate(scores):
            try:
                line.copy_(self.sampler.scores(line[None, None], [tokens[: first + j]])[0, 0])
            except Exception as error:
                if judges:
                    self.error, self.failed_at = error, first + j
                break
        return scores

    def _node_by_node(self, scores: Tensor, row: list[int], guess: Guess) -> Tensor:
        """Scores of the nodes of a tree, NaN where a processor fails: whether that is reached, `refuse` hears."""
        tokens = guess.tokens[0].tolist()
        for node, line in enumerate(scores, END):
            prefix = row + [tokens[n] for n in path(guess.parents[0], node)]
            try:
                line.copy_(self.sampler.scores(line[None, None], [prefix])[0, 0])
            except Exception as error:
                line.fill_(torch.nan)
                self.failures.setdefault(len(prefix), error)
        return scores


class RowSampler(Sampler):
    """The sampler of a batch whose rows have rules of their own.

    rules: one per row, a list that the loop keeps in step with the batch and all samplers of a chain share. Rows are
    processed one by one, so that none sees another's numbers. judges: this is the target's sampler.
    """

    def __init__(self, vocab_size: int, rules: list[RowRule], judges: bool = False):
        super().__init__(vocab_size)
        self.rules, self.judges = rules, judges

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the argmax of its logits."""
        return all(rule.is_greedy for rule in self.rules)

    @property
    def is_plain(self) -> bool:
        """Whether every row is, as of `RowRule`."""
        return all(rule.is_plain for rule in self.rules)

    @property
    def do_sample(self) -> bool:
        """Whether any row is drawn."""
        return any(rule.seed is not None for rule in self.rules)

    @property
    def reads_tokens(self) -> bool:
        """Whether the scores of any row depend on the tokens before a position."""
        return any(rule.sampler.reads_tokens for rule in self.rules)

    def refuse(self, row: int, position: int, error: Exception) -> None:
        """A token the target cannot take ends its row only; a level below that fails is the whole call's."""
        if not self.judges:
            raise error
        self.rules[row].error, self.rules[row].failed_at = self.rules[row].failures.get(position, error), position

    def scores(
        self, logits: Tensor, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None
    ) -> Tensor:
        """See `Sampler.scores`."""
        scores = self.fit(logits)
        if all(rule.sampler.is_greedy for rule in self.rules):
            return scores
        alive, lengths = alive or [True] * len(rows), guess.lengths if guess else [0] * len(rows)
        scores = scores.clone()
        for r, (rule, row, n, on) in enumerate(zip(self.rules, rows, lengths, alive, strict=True)):
            if on:
                own = guess.of_row(r) if guess else None
                scores[r, : n + 1] = rule.scores(scores[r, : n + 1], row, own, self.judges)
        return scores

    def choose(
        self, scores: Tensor, firsts: list[int], lengths: list[int], parents: list[Parents] | None = None
    ) -> Tensor:
        """See `Sampler.choose`; every row that samples has noise of its own seed, as row 0."""
        best = super().choose(scores, firsts, lengths)  # of rows without noise
        if not self.do_sample:
            return best
        for r, (rule, first, n) in enumerate(zip(self.rules, firsts, lengths, strict=True)):
            if rule.seed is not None and n >= 0:
                tree = None if parents is None else [parents[r]]
                tokens, confidence = drawn(scores[r : r + 1, : n + 1], rule.seed, [0], [first], tree)
                best[r, : n + 1] = tokens.masked_fill(confidence.isnan(), -1)[0]
        return best

    def draw(self, scores: Tensor, positions: list[int], alive: list[bool] | None = None) -> tuple[Tensor, Tensor]:
        """See `Sampler.draw`."""
        lengths = [0 if on else -1 for on in alive or [True] * len(scores)]
        tokens = self.choose(scores[:, None], positions, lengths)[:, 0].clamp(min=0)
        return tokens, self.probabilities(scores).gather(1, tokens[:, None])[:, 0]
