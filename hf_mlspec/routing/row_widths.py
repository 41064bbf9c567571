"""Which widths has every row of an engine that routes, as rows join, move and leave?"""

from __future__ import annotations

import torch


class RowWidths:
    """In front of an engine's class: keeps the widths of its rows.

    chosen: of every row the widths of its blocks, None before its prompt was read.
    """

    chosen: list[list[int] | None]

    def start(self, batch: int, device: torch.device) -> None:
        super().start(batch, device)
        self.chosen = [None] * batch

    def select(self, keep: list[int]) -> None:
        super().select(keep)
        self.chosen = [self.chosen[row] for row in keep]

    def admit(self, count: int) -> None:
        super().admit(count)
        self.chosen = self.chosen + [None] * count

    def forget(self, row: int) -> None:
        super().forget(row)
        self.chosen[row] = None
