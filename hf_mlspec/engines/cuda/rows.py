"""Behind which tokens can a row of the CUDA decoder go on, and what becomes of its state there?

Of keys and values any length; of recurrent layers any length that is not behind their state (states.py). A row that
was taken back further is read again. A follower drafts in the states of the engine whose cache it writes into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...ops.delta import AT_START, KEEP
from ..engine import Rows
from ..lanes import KeptState
from ..rows import DecoderRows
from .decoder import CudaDecoder
from .states import DeltaStates


class CudaRows(DecoderRows):
    """Rows of a CUDA decoder: keys and values as `DecoderRows` has them, and states of recurrent layers.

    states: None where the decoder has no such layers, and of a follower. settled: of how many tokens each state is,
    None where nobody knows: only a row that begins anew can go on there.
    """

    decoder: CudaDecoder
    states: DeltaStates | None = None
    settled: list[int | None]

    @property
    def bytes_per_row(self) -> int:
        """Of states, at first."""
        layers = self.decoder.num_recurrent
        if not layers or self.follow:
            return 0
        return DeltaStates.row_bytes(self.decoder.sizes.delta, layers, self.decoder.dtype)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys, values and states that this engine holds itself."""
        return super().cache_bytes + (0 if self.states is None else self.states.nbytes)

    def start(self, batch: int, device: torch.device) -> None:
        """An empty cache for `batch` rows; a follower takes its leader's, which must have started."""
        super().start(batch, device)
        layers, self.states, self.settled = self.decoder.num_recurrent, None, [0] * batch
        if layers and not self.follow:
            how = self.decoder.dtype, self.decoder.device
            self.states = DeltaStates.new(self.decoder.sizes.delta, layers, batch, *how)

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only."""
        super().select(keep)
        self.settled = [self.settled[r] for r in keep]
        if self.states is not None:
            self.states = self.states.picked(keep)

    def admit(self, count: int) -> None:
        """Append `count` rows that hold nothing yet."""
        super().admit(count)
        self.settled = self.settled + [0] * count
        if self.states is not None:
            self.states = self.states.grown(self.states.rows + count, self.states.window)

    def forget(self, row: int) -> None:
        """Give the slots of `row` to a new sequence."""
        super().forget(row)
        self.settled[row] = None

    def hold(self, row: int, pieces: Iterable[Tensor], count: int, state: KeptState | None = None) -> None:
        """As of `DecoderRows`."""
        super().hold(row, pieces, count, state)
        if state is not None and row < len(self.settled):  # captured rounds have more places than rows
            self.settled[row] = count

    def _lane_states(self) -> DeltaStates | None:
        layers, how = self.decoder.num_recurrent, (self.decoder.dtype, self.decoder.device)
        return DeltaStates.new(self.decoder.sizes.delta, layers, 1, *how) if layers else None

    @property
    def _owner(self) -> CudaRows:
        """Whose cache and states this engine reads and writes."""
        owner = self
        while owner.follow is not None:
            owner = owner.follow
        return owner

    def _lower(self, rows: Rows) -> None:
        """Rows whose state is behind what they are to go on from begin anew."""
        if self.states is None:
            return
        for r, (row, have) in enumerate(zip(rows, self.lengths, strict=True)):
            if self.settled[r] is None or self.settled[r] > min(have, max(len(row) - 1, 0)):
                self.lengths[r], self.settled[r] = 0, 0
                self.states.forget([r])

    def _reaches(self, starts: list[int]) -> bool:
        """Whether the states of these rows are none of more tokens."""
        return self.states is None or all(have <= start for have, start in zip(self.settled, starts, strict=True))

    def _states(
        self, starts: list[int], counts: list[int], drafts: bool
    ) -> tuple[DeltaStates | None, int]:
        """The states for a call of these tokens, and what becomes of them. drafts: they may well be taken back, and
        those before them, too."""
        owner = self._owner
        if owner.states is None:
            return None, KEEP
        keeps = drafts or owner is not self
        far = [start + count - ((settled or 0) if keeps else start)
               for start, count, settled in zip(starts, counts, owner.settled, strict=True) if count]  # fmt: skip
        wanted = max(far, default=0) + self.decoder.sizes.delta.taps
        if keeps and owner is self and wanted > owner.states.window:
            keeps, wanted = False, max(counts) + self.decoder.sizes.delta.taps
        if wanted > owner.states.window:
            owner.states = owner.states.grown(owner.states.rows, 1 << (2 * wanted - 1).bit_length())
        return owner.states, KEEP if keeps else AT_START

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """A call that moves states. Where it ends early, those of some layers may be of more tokens than others'."""
        try:
            yield
        except BaseException:
            self.settled = [None] * len(self.settled)
            raise

    def _settled(self, starts: list[int], counts: list[int]) -> None:
        """The states of rows with tokens are now those behind so many."""
        self.settled = [start if count else have
                        for start, count, have in zip(starts, counts, self.settled, strict=True)]  # fmt: skip
