"""What does a level hand to the level that checks it, and what must every level be able to do?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..engines.engine import Guess, Rows, Scores
from ..engines.trees import END, Parents, depths, require_tree
from .stats import LevelStats

__all__ = ["Draft", "Drafter", "Rows"]


@dataclass
class Draft:
    """Proposed continuations of a batch of rows: guesses at the tokens that the level above will take (invariant 1).

    tokens:  int64 ``[batch, k]``; row r's entries from ``lengths[r]`` on are padding (any id the checker can embed).
    lengths: per row the number of proposed tokens, 0..k.
    scores:  scores of row and draft by the engine of the level above, if the call that drafted computed them.
    parents: of every row's tokens where they are trees (engines/trees.py), the likeliest branch first; None: each
             follows the one before it. ValueError for what is no tree.
    """

    tokens: Tensor
    lengths: list[int]
    scores: Scores | None = None
    parents: list[Parents] | None = None

    def __post_init__(self):
        for parents, n in zip(self.parents or [], self.lengths, strict=self.parents is not None):
            require_tree(parents, n)

    @cached_property
    def branches(self) -> bool:
        """Whether the tokens of a row are something else than one row."""
        return self.parents is not None and any(own != list(range(END, len(own) - 1)) for own in self.parents)

    @property
    def deepest(self) -> list[int]:
        """Per row the tokens of its longest branch."""
        return [max(depths(own), default=0) for own in self.parents] if self.branches else self.lengths

    def guess(self) -> Guess | None:
        """The tokens and their lengths, as an engine takes them; None where nothing at all is proposed."""
        parents = self.parents if self.branches else None
        return Guess(self.tokens, self.lengths, parents) if self.tokens.shape[1] else None

    @classmethod
    def from_lists(cls, rows: Rows, device: torch.device | str = "cpu") -> Draft:
        """A draft from one list of token ids per row."""
        width = max(map(len, rows), default=0)
        padded = [row + [0] * (width - len(row)) for row in rows]
        tokens = torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), width)
        return cls(tokens, [len(row) for row in rows])

    @classmethod
    def trees(cls, rows: Rows, parents: list[Parents], device: torch.device | str = "cpu") -> Draft:
        """A draft from the tokens of one tree per row, and their parents."""
        draft = cls.from_lists(rows, device)
        return cls(draft.tokens, draft.lengths, parents=parents)

    @classmethod
    def nothing(cls, rows: int, device: torch.device | str = "cpu") -> Draft:
        """A draft without tokens."""
        return cls(_no_tokens(rows, device), [0] * rows)

    def rows(self) -> Rows:
        """The proposed tokens of every row as a list."""
        if not any(self.lengths):
            return [[] for _ in self.lengths]
        return [line[:n] for line, n in zip(self.tokens.tolist(), self.lengths, strict=True)]


@lru_cache(maxsize=64)
def _no_tokens(rows: int, device: torch.device | str) -> Tensor:
    """int64 ``[rows, 0]``, kept: where other threads want the GIL, each torch op may have to wait for it."""
    with torch.inference_mode(False):
        return torch.empty(rows, 0, dtype=torch.long, device=device)


@runtime_checkable
class Drafter(Protocol):
    """A level below the target. See docs/architecture.md, "The drafter protocol".

    It knows the rows of one call, so one object serves one call, or one stream, at a time. (The
    package's own lookups and n-gram tables are forked for every call.)
    """

    name: str
    stats: LevelStats

    def start(self, batch: int, device: torch.device) -> None:
        """Forget all earlier sequences; `batch` rows follow, draft tensors are on `device`."""

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        """Propose at most `limits[r]` tokens after row r (token ids); `rows` must be unchanged afterwards."""

    def rollback(self, lengths: list[int]) -> None:
        """The first `lengths[r]` tokens of row r followed by its proposal are valid, the others were rejected."""

    def select(self, keep: list[int]) -> None:
        """Continue with the rows of these indices only, in this order."""

    def admit(self, count: int) -> None:
        """Append `count` new rows, whose tokens come with the next `propose`."""

    def replace(self, row: int) -> None:
        """Row `row` ended; a new row takes its place, whose tokens come with the next `propose`."""
