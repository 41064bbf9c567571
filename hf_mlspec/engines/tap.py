"""Where do the hidden states lie that a trained head reads? In one buffer a chain, which its engines write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rows import up_to_growth


class Tap:
    """Hidden states in front of some layers, of the tokens that engines fed, row by row and position by position.

    layers: ascending, 0 (the embedding's output) up to the number of layers (behind the last one): entry k of what
        transformers calls ``hidden_states``, but the last, which is taken before the final norm.
    states: `[rows, slots, layers, hidden]` of the model's dtype. first, end: of each row the positions that are
        known, first[r] .. end[r] - 1. fresh: of each row the first position written since `read`.

    An engine that feeds a position again replaces what it held: in a chain the target's states take the place of those
    of the level that checked before it. One tap serves one call.
    """

    def __init__(self, layers: Sequence[int], hidden: int, dtype: torch.dtype):
        self.layers, self.hidden, self.dtype = list(layers), hidden, dtype
        self.states: Tensor | None = None
        self.first: list[int] = []
        self.end: list[int] = []
        self.fresh: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes that the states take."""
        return 0 if self.states is None else self.states.nbytes

    def start(self, rows: int, slots: int, device: torch.device) -> None:
        """Nothing is known of so many rows."""
        with torch.inference_mode(False):
            self.states = torch.empty(
                rows, up_to_growth(max(slots, 1)), len(self.layers), self.hidden, dtype=self.dtype, device=device
            )
        self.first, self.end, self.fresh = [0] * rows, [0] * rows, [0] * rows

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for so many rows of so many slots; half as many slots again where there are too few."""
        have_rows, have = self.states.shape[:2]
        if rows <= have_rows and slots <= have:
            return
        wanted = have if slots <= have else up_to_growth(max(slots, have + have // 2))
        with torch.inference_mode(False):
            larger = self.states.new_empty(max(rows, have_rows), wanted, *self.states.shape[2:])
        larger[:have_rows, :have] = self.states
        self.states = larger

    def wrote(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """The states of counts[r] positions of row r, from starts[r] on, are written; what lay behind is nobody's."""
        for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if not count:
                continue
            if start > self.end[r] or start + count < self.first[r]:  # what lies between was fed elsewhere
                self.first[r] = start
            self.first[r] = min(self.first[r], start)
            self.end[r], self.fresh[r] = start + count, min(self.fresh[r], start)

    def cut(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """A pass over counts[r] positions of row r has failed: what lies from starts[r] on is nobody's."""
        for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
            self.end[r] = min(self.end[r], start) if count else self.end[r]

    def keep(self, row: int, slots: Sequence[int], first: int) -> None:
        """Of a tree's nodes those in these slots are kept: their states go to positions first, first + 1 ..."""
        self.states[row, first : first + len(slots)] = self.states[row, list(slots)]
        self.end[row] = first + len(slots)

    def read(self, row: int) -> int:
        """From which position on the states of a row are other ones than the last time."""
        fresh, self.fresh[row] = self.fresh[row], self.end[row]
        return fresh

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only, in this order."""
        self.states[: len(keep)] = self.states[keep]
        self.first, self.end, self.fresh = ([line[r] for r in keep] for line in (self.first, self.end, self.fresh))

    def admit(self, count: int) -> None:
        """Append rows of which nothing is known."""
        rows = len(self.first) + count
        self.reserve(rows, self.states.shape[1])
        self.first, self.end, self.fresh = (line + [0] * count for line in (self.first, self.end, self.fresh))

    def forget(self, row: int) -> None:
        """Another row takes the place of this one."""
        self.first[row] = self.end[row] = self.fresh[row] = 0
