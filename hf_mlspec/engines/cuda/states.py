"""What do recurrent layers keep of the rows of a cache on a device, so that a rollback copies nothing?

Of every row one state, which lags behind its tokens, and the inputs of those since. A call runs them again, in the
registers in which it goes on (`ops.delta_rows`). Who checks leaves the state behind the tokens that were settled when
the check began; who drafts leaves it alone. So any tokens behind it can be rejected, others take the places of their
inputs, and a level that drafts in the cache of the one above needs no state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.compiled_decoder import DeltaSizes
from ...ops.delta import AT_END, KEEP
from ..architecture.delta import MOST_TAPS
from ..lanes import KeptState

WINDOW = 64  # tokens of a row whose inputs are kept at least


class DeltaStates(NamedTuple):
    """States of rows. states: float32 ``[layers, rows, value_heads, key_dim, value_dim]``, inputs ``[layers, rows,
    window, kept_width]``, marks int32 ``[rows]``, behind: as `ops.delta_rows` takes them of a layer."""

    states: Tensor
    inputs: Tensor
    marks: Tensor
    behind: int = 0

    @classmethod
    def new(
        cls, sizes: DeltaSizes, layers: int, rows: int, dtype: torch.dtype, device: torch.device, window: int = WINDOW,
        behind: int = 0,
    ) -> DeltaStates:  # fmt: skip
        """Of rows that hold no token; window: tokens of a row whose inputs are kept."""
        with torch.inference_mode(False):
            each = rows, sizes.value_heads, sizes.key_dim, sizes.value_dim
            return cls(
                torch.zeros(layers, *each, device=device),
                torch.zeros(layers, rows, window, sizes.kept_width, dtype=dtype, device=device),
                torch.zeros(rows, dtype=torch.int32, device=device),
                behind,
            )

    @staticmethod
    def row_bytes(sizes: DeltaSizes, layers: int, dtype: torch.dtype) -> int:
        """What a row takes at first."""
        state = 4 * sizes.value_heads * sizes.key_dim * sizes.value_dim
        return layers * (state + WINDOW * sizes.kept_width * dtype.itemsize) + 4

    @property
    def rows(self) -> int:
        """Rows that there is room for."""
        return len(self.marks)

    @property
    def window(self) -> int:
        """Tokens of a row whose inputs are kept."""
        return self.inputs.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.states.nbytes + self.inputs.nbytes + self.marks.nbytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """What a captured call holds of them."""
        held = tuple(tensor.data_ptr() for tensor in (self.states, self.inputs, self.marks))
        return *held, self.rows, self.window, self.behind

    def part(self, first: int, end: int) -> DeltaStates:
        """Those of rows first .. end, as views."""
        return DeltaStates(self.states[:, first:end], self.inputs[:, first:end], self.marks[first:end], self.behind)

    def forget(self, rows: Sequence[int]) -> None:
        """Of these rows nothing is known any more."""
        self.marks[list(rows)] = 0

    def picked(self, rows: Sequence[int]) -> DeltaStates:
        """Copies of these rows', in this order."""
        with torch.inference_mode(False):
            index = torch.tensor(rows, dtype=torch.int64, device=self.marks.device)
            return DeltaStates(self.states[:, index], self.inputs[:, index], self.marks[index], self.behind)

    def move(self, place: int, row: int) -> None:
        """What is kept of `row` is that of `place`, too."""
        self.states[:, place] = self.states[:, row]
        self.inputs[:, place] = self.inputs[:, row]
        self.marks[place] = self.marks[row]

    def taken(self, row: int, count: int) -> KeptState:
        """A copy of what is kept of `row` behind its first `count` tokens, which its state is of."""
        return KeptState(self.states[:, row].clone(), self.inputs[:, row, self._before(count)].clone())

    def put(self, row: int, kept: KeptState, count: int) -> None:
        """`row` goes on behind `count` tokens, of which this is kept."""
        self.states[:, row] = kept.states
        self.inputs[:, row, self._before(count)] = kept.inputs
        self.marks[row] = count

    def _before(self, count: int) -> Tensor:
        """Where the inputs lie that the next token may read."""
        return torch.arange(max(count - MOST_TAPS + 1, 0), count, device=self.inputs.device) % self.window

    def grown(self, rows: int, window: int) -> DeltaStates:
        """The same in larger tensors; a window that differs is twice as large at least."""
        layers, _, *heads = self.states.shape
        with torch.inference_mode(False):
            states = self.states.new_zeros(layers, rows, *heads)
            inputs = self.inputs.new_zeros(layers, rows, window, self.inputs.shape[3])
            marks = self.marks.new_zeros(rows)
        states[:, : self.rows], marks[: self.rows] = self.states, self.marks
        if window == self.window:
            inputs[:, : self.rows] = self.inputs
        else:  # token p moves from place p % window; of those that share one the other counts no more
            for row, mark in enumerate(self.marks.tolist()):
                tokens = torch.arange(max(0, mark - MOST_TAPS), mark + self.window, device=inputs.device)
                inputs[:, row, tokens % window] = self.inputs[:, row, tokens % self.window]
        return DeltaStates(states, inputs, marks, self.behind)

    def settle(self, starts: Tensor, counts: Tensor, how: int) -> None:
        """A call of these rows is done whose layers left states by this rule; only enqueues."""
        if how != KEEP:
            reached = starts + counts if how == AT_END else starts
            if self.behind:
                reached = torch.maximum(reached - self.behind, torch.where(starts > 0, self.marks, 0))
            self.marks.copy_(torch.where(counts > 0, reached, self.marks))
