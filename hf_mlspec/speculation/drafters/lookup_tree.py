"""What have this row, and everything seen so far, continued with before? All of it at once, merged into one tree.

Lookups cost next to nothing, and each of them knows several continuations: other places of the row, other successors
of a context. As branches of one tree they are checked in one pass (trees of n-gram guesses: Fu et al. 2024, "Break the
Sequential Dependency of LLM Inference Using Lookahead Decoding"; of retrieved ones: He et al. 2024, "REST").
"""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

import torch

from ...engines.trees import END, MOST_NODES, Parents, width_at
from ..draft import Draft, Drafter, Rows
from ..stats import LevelStats


class Lookup(Drafter, Protocol):
    """A lookup that knows more than one continuation."""

    def branches(self, rows: Rows, limits: list[int], widths: list[int]) -> list[Rows]:
        """Continuations of every row, of at most limits[r] tokens each, what `propose` proposes first; widths: how
        many there may be of a place, by its depth, one behind the last depth."""

    def fork(self) -> Lookup:
        """Another one with the same settings and table, for one call."""


class LookupTree:
    """Level "lookups": continuations of several lookups as one tree, the first lookup's first.

    widths: the most tokens that are proposed behind a token, by depth, from the row's end on; one behind the last of
    them. With no widths a draft is a row, of the first lookup that has one.
    """

    def __init__(self, lookups: list[Lookup], widths: list[int] | tuple[int, ...] = (), name: str = "lookups") -> None:
        several = isinstance(lookups, (list, tuple)) and len(lookups) > 0
        if not several or not all(hasattr(one, "branches") for one in lookups):
            raise TypeError(f"lookups is {lookups!r}: it takes a list of PromptLookup and NGram, one or more")
        if not all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in widths):
            raise ValueError(f"widths is {widths!r}: every depth has a positive number of tokens, as in [3, 2, 1]")
        self.lookups, self.widths, self.name = list(lookups), list(widths), name
        self.stats = LevelStats(name)
        self._device = torch.device("cpu")

    @property
    def largest_token(self) -> int:
        """The largest token id in a table of these lookups, -1 where there is none."""
        return max(getattr(lookup, "largest_token", -1) for lookup in self.lookups)

    def fork(self) -> LookupTree:
        """Another one with lookups of its own over the same tables, for one call of generate."""
        return LookupTree([lookup.fork() for lookup in self.lookups], self.widths, self.name)

    def start(self, batch: int, device: torch.device) -> None:
        """Forget all earlier rows; `batch` rows follow, draft tensors are on `device`."""
        self.stats.reset()
        self._device = device
        for lookup in self.lookups:
            lookup.start(batch, device)

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        """A tree of at most `limits[r]` tokens on each branch."""
        began = perf_counter()
        found = [lookup.branches(rows, limits, self.widths) for lookup in self.lookups]
        trees = [merged([line for own in lines for line in own], self.widths) for lines in zip(*found, strict=True)]
        draft = Draft.trees([tokens for tokens, _ in trees], [parents for _, parents in trees], self._device)
        self.stats.rounds += 1
        self.stats.seconds += perf_counter() - began
        return draft

    def rollback(self, lengths: list[int]) -> None:
        """Forget what row r holds beyond its first `lengths[r]` tokens."""
        for lookup in self.lookups:
            lookup.rollback(lengths)

    def select(self, keep: list[int]) -> None:
        """Continue with the rows of these indices only, in this order."""
        for lookup in self.lookups:
            lookup.select(keep)

    def admit(self, count: int) -> None:
        """Append `count` new rows."""
        for lookup in self.lookups:
            lookup.admit(count)

    def replace(self, row: int) -> None:
        """Another row takes the place of row `row`."""
        for lookup in self.lookups:
            lookup.replace(row)


def merged(lines: Rows, widths: list[int]) -> tuple[list[int], Parents]:
    """Continuations as one tree, (tokens, parents): what begins alike is one branch; a line ends where there are as
    many tokens as `widths` says already, 1 behind its last depth, and where the tree is full."""
    tokens: list[int] = []
    parents: Parents = []
    below: dict[int, dict[int, int]] = {}
    for line in lines:
        node = END
        for depth, token in enumerate(line):
            known = below.setdefault(node, {})
            if token not in known:
                if len(known) >= width_at(widths, depth) or len(tokens) == MOST_NODES:
                    break
                known[token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = known[token]
    return tokens, parents
