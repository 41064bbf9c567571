"""Which widths has every row of an engine that routes, as rows join, move and leave?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines.engine import Guess, Rows


class Query(NamedTuple):
    """A row's prompt, where steps behind it choose, too: its tokens; of every block the mean of its inputs, float32
    ``[features]`` each."""

    tokens: int
    means: list[Tensor]


class RowWidths:
    """In front of an engine's class: keeps the widths of its rows.

    chosen: of every row the widths of its blocks, None before its prompt was read. queries: of rows whose
    steps choose.
    """

    chosen: list[list[int] | None]
    queries: list[Query | None]

    def start(self, batch: int, device: torch.device) -> None:
        super().start(batch, device)
        self.chosen, self.queries = [None] * batch, [None] * batch

    def select(self, keep: list[int]) -> None:
        super().select(keep)
        self.chosen, self.queries = ([own[row] for row in keep] for own in (self.chosen, self.queries))

    def admit(self, count: int) -> None:
        super().admit(count)
        self.chosen, self.queries = (own + [None] * count for own in (self.chosen, self.queries))

    def forget(self, row: int) -> None:
        super().forget(row)
        self.chosen[row] = self.queries[row] = None


class ChoosingRows(RowWidths, ABC):
    """The same in front of a compiled engine, which chooses in a pass of its own before it reads a row."""

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """As `Engine.feed`; rows without widths are read from their first token on, and choose."""
        for r, row in enumerate(rows):
            if self.chosen[r] is None and (alive is None or alive[r]):
                self._choose(r, row, len(rows))
        return super().feed(rows, guess, alive)

    @abstractmethod
    def _choose(self, r: int, row: list[int], batch: int) -> None:
        """Row r of ``batch``, whose tokens are ``row``, gets its widths, and all but its last token are read."""
