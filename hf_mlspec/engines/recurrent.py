"""What do recurrent layers keep of the rows of a call, and to which lengths can it be taken back?

Of every row a few states, each of its first so many tokens, and the inputs of its last tokens: a state of a length in
between is made by running those behind a shorter one again (kernels_ext/cpu/decoder/decoder_states.h). A rollback
lowers lengths and does nothing else; the next call behind a length finds or makes the state that belongs to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.compiled_decoder import DeltaSizes
from .lanes import KeptState

STATES = 2  # of a row: where its tokens are settled, and behind what is checked
WINDOW = 32  # tokens of a row whose inputs are kept at first
MOST_WINDOW = 256  # and at most: a longer draft that is rejected takes its row from the beginning


class RecurrentRows:
    """States of the rows of a batch, of `layers` recurrent layers; no row knows a token at first.

    tensors: states float32 `[layers, rows, states, value_heads, key_dim, value_dim]`, inputs float32 `[layers, rows,
    window, kept_width]`, of token p in place p % window, and int64 `[rows, states + 2]`: of how many tokens each state
    is, -1 for none, and the first and the end of the tokens whose inputs are there.
    """

    def __init__(self, sizes: DeltaSizes, layers: int, rows: int, states: int = STATES, window: int = WINDOW):
        self._sizes, self._layers, self._states, self.rows = sizes, layers, states, rows
        self.tensors = self._new(rows, window)

    @staticmethod
    def row_bytes(sizes: DeltaSizes, layers: int, states: int = STATES) -> int:
        """What a row takes at first."""
        state = sizes.value_heads * sizes.key_dim * sizes.value_dim
        return 4 * layers * (states * state + WINDOW * sizes.kept_width) + 8 * (states + 2)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def window(self) -> int:
        """Tokens of a row whose inputs are kept."""
        return self.tensors[1].shape[2]

    def reserve(self, tokens: int) -> None:
        """Keep the inputs of so many tokens that may be rejected, and of those that the first of them reads."""
        wanted = min(tokens + self._sizes.taps, MOST_WINDOW)
        if wanted <= self.window:
            return
        states, old, marks = self.tensors
        window = 1 << (wanted - 1).bit_length()
        inputs = self._new(self.rows, window)[1]
        for row, (*_, first, end) in enumerate(marks[: self.rows].tolist()):
            tokens_held = torch.arange(first, end)
            inputs[:, row, tokens_held % window] = old[:, row, tokens_held % self.window]
        self.tensors = [states[:, : self.rows], inputs, marks[: self.rows]]
        self.tensors = [tensor.contiguous() for tensor in self.tensors]

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only, in this order."""
        if keep != list(range(len(keep))):
            for tensor in self.tensors:
                rows = tensor if tensor.dtype == torch.int64 else tensor.transpose(0, 1)
                rows[: len(keep)] = rows[keep]
        self.rows = len(keep)

    def extend_rows(self, count: int) -> None:
        """Append `count` rows of which nothing is known yet."""
        wanted = self.rows + count
        if wanted > len(self.tensors[2]):
            grown = self._new(wanted, self.window)
            for new, old in zip(grown, self.tensors, strict=True):
                if old.dtype == torch.int64:
                    new[: self.rows] = old[: self.rows]
                else:
                    new[:, : self.rows] = old[:, : self.rows]
            self.tensors = grown
        for row in range(self.rows, wanted):
            self.forget(row)
        self.rows = wanted

    def taken(self, row: int, count: int) -> KeptState:
        """A copy of what is kept of `row` behind its first `count` tokens, which a call has just left."""
        states, inputs, marks = self.tensors
        number = marks[row, :-2].tolist().index(count)
        return KeptState(states[:, row, number].clone(), inputs[:, row, self._before(count) % self.window].clone())

    def put(self, row: int, kept: KeptState, count: int) -> None:
        """`row` goes on behind `count` tokens, of which this is kept."""
        states, inputs, marks = self.tensors
        self.forget(row)
        states[:, row, 0] = kept.states
        inputs[:, row, self._before(count) % self.window] = kept.inputs
        marks[row, 0], marks[row, -2], marks[row, -1] = count, max(count - self._sizes.taps + 1, 0), count

    def _before(self, count: int) -> Tensor:
        """The tokens whose inputs the next one reads."""
        return torch.arange(max(count - self._sizes.taps + 1, 0), count)

    def forget(self, row: int) -> None:
        """Nothing is known of `row` any more."""
        marks = self.tensors[2][row]
        marks[:-2], marks[-2:] = -1, 0

    def _new(self, rows: int, window: int) -> list[Tensor]:
        sizes = self._sizes
        with torch.inference_mode(False):
            states = torch.empty(
                self._layers, rows, self._states, sizes.value_heads, sizes.key_dim, sizes.value_dim
            )
            inputs = torch.empty(self._layers, rows, window, sizes.kept_width)
            marks = torch.full((rows, self._states + 2), -1)
            marks[:, -2:] = 0
        return [states, inputs, marks]
