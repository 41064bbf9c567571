"""Behind which tokens can a row of the CPU decoder go on, and whose states does it begin with?

Of keys and values any length. Recurrent layers have states of some: what a rollback leaves of a row is found or made
again by the next call. A follower's states begin as those of the engine which it follows, as long as that knows as
many tokens: what the leader checked is what the follower has to go on from. Beyond that it has states of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine import Rows
from ..recurrent import RecurrentRows
from ..rows import DecoderRows
from .decoder import CpuDecoder


class CpuRows(DecoderRows):
    """Rows of a CPU decoder: keys and values as `DecoderRows` has them, and states of recurrent layers.

    states: None where the decoder has no such layers; a follower's are its own.
    """

    decoder: CpuDecoder
    states: RecurrentRows | None = None

    @property
    def bytes_per_row(self) -> int:
        """Of states, at first."""
        layers = self.decoder.num_recurrent
        return RecurrentRows.row_bytes(self.decoder.sizes.delta, layers) if layers else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys, values and states that this engine holds itself."""
        return super().cache_bytes + (0 if self.states is None else self.states.nbytes)

    def start(self, batch: int, device: torch.device) -> None:
        """An empty cache for `batch` rows; a follower takes its leader's, which must have started."""
        super().start(batch, device)
        if self.decoder.num_recurrent:
            self.states = RecurrentRows(self.decoder.sizes.delta, self.decoder.num_recurrent, batch)

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only."""
        super().select(keep)
        if self.states is not None:
            self.states.select(keep)

    def admit(self, count: int) -> None:
        """Append `count` rows that hold nothing yet."""
        super().admit(count)
        if self.states is not None:
            self.states.extend_rows(count)

    def forget(self, row: int) -> None:
        """Give the slots of `row` to a new sequence."""
        super().forget(row)
        if self.states is not None:
            self.states.forget(row)

    def _lane_states(self) -> RecurrentRows | None:
        layers = self.decoder.num_recurrent
        return RecurrentRows(self.decoder.sizes.delta, layers, 1) if layers else None

    def _starts(self, rows: Rows) -> list[int]:
        """Per row the tokens that need no feeding: its last one is always scored."""
        starts = [min(have, len(row) - 1) for row, have in zip(rows, self.lengths, strict=True)]
        return starts if self.states is None else lowered(self, starts)

    def _states(self, starts: list[int], checked: int = 0) -> tuple[list[Tensor], list[int]]:
        """What recurrent layers keep, of this engine and of those that it follows, and per row whose state it begins
        with: 0, its own. checked: tokens of a row that may be rejected."""
        if self.states is None:
            return [], []
        self.states.reserve(checked)
        owners = owners_of(self)
        tensors = [tensor for owner in owners for tensor in owner.states.tensors]
        return tensors, [source_of(owners, r, start) for r, start in enumerate(starts)]


def owners_of(engine: CpuRows) -> list[CpuRows]:
    """The engine, the one that it follows, and so on."""
    owners = [engine]
    while owners[-1].follow is not None:
        owners.append(owners[-1].follow)
    return owners


def source_of(owners: list[CpuRows], row: int, start: int) -> int:
    """Which of them has the state that `row` begins with behind `start` tokens; 0: the engine itself."""
    return next(
        (place for place, leader in enumerate(owners[1:]) if start > leader.lengths[row]),
        len(owners) - 1,
    )


def lowered(engine: CpuRows, starts: list[int]) -> list[int]:
    """`starts`, or of rows without such a state fewer tokens, behind which they have one: those in between are fed
    again. A leader that has no state of tokens which it holds knows no more of them than it has."""
    owners = owners_of(engine)
    places = {source_of(owners, r, start) for r, start in enumerate(starts)}
    if len(places) == 1 and _reach(owners[places.pop()], starts) == starts:
        return starts
    return [_lowered(owners, r, start) for r, start in enumerate(starts)]


def _lowered(owners: list[CpuRows], row: int, start: int) -> int:
    while True:
        place = source_of(owners, row, start)
        reached = _reach(owners[place], [start] * (row + 1))[row]
        if reached == start:
            return start
        if place == 0 and len(owners) > 1 and owners[1].lengths[row] > reached:
            start = owners[1].lengths[row]  # its leader knows more than it does
            continue
        for owner in owners[: place + 1]:
            owner.lengths[row] = min(owner.lengths[row], reached)
        start = reached


def _reach(owner: CpuRows, wanted: list[int]) -> list[int]:
    return owner.decoder.handle.reach(owner.states.tensors, wanted)
