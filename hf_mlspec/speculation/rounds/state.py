"""What does a captured chain keep on the device from round to round? Integers at fixed addresses, one line per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.integers import integers


class Noise(NamedTuple):
    """How a row samples: with the noise of this stream of a seed, which is added to logits over a temperature; a
    stream of -1: it does not."""

    seed: int = 0
    stream: int = -1
    temperature: float = 1.0


@dataclass
class RoundState:
    """int32 tensors of `batch` rows; what they mean: ops/round.py.

    tokens ``[batch, slots]``. lengths, active, ends ``[levels, batch]``: of the target (level 0) how many tokens it
    has accepted, whether the row goes on and the length it may reach; of a level below it the same for its guesses.
    failed, streams ``[batch]``: the level (from 1) whose logits held NaN; the number of the row's noise, -1 for none.
    seeds int64, temperatures float32 ``[batch]``: of that noise (`Noise`). script ``[levels, batch, rounds, 2]`` and
    cursor ``[levels, batch]``: verdicts to be given instead of found, None to find them.
    """

    tokens: Tensor
    lengths: Tensor
    active: Tensor
    ends: Tensor
    failed: Tensor
    streams: Tensor
    seeds: Tensor
    temperatures: Tensor
    script: Tensor | None = None
    cursor: Tensor | None = None

    @classmethod
    def new(
        cls, batch: int, slots: int, levels: int, device: torch.device, script_rounds: int = 0
    ) -> RoundState:
        """Zeros; no script unless it has rounds."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(batch, slots),
            *(zeros(levels, batch) for _ in range(3)),
            *(zeros(batch) for _ in range(2)),
            zeros(batch, dtype=torch.int64),
            zeros(batch, dtype=torch.float32) + 1,
            zeros(levels, batch, script_rounds, 2) if script_rounds else None,
            zeros(levels, batch) if script_rounds else None,
        )

    def of_rows(self, batch: int) -> RoundState:
        """The first `batch` rows, in the same memory."""
        script, cursor = self.script, self.cursor
        return RoundState(
            self.tokens[:batch],
            *(vector[:, :batch] for vector in (self.lengths, self.active, self.ends)),
            *(vector[:batch] for vector in (self.failed, self.streams, self.seeds, self.temperatures)),
            None if script is None else script[:, :batch],
            None if cursor is None else cursor[:, :batch],
        )

    def clear(self) -> None:
        """No row takes part."""
        for tensor in (self.lengths, self.active, self.ends, self.failed, self.streams, self.seeds, self.script,
                       self.cursor):  # fmt: skip
            if tensor is not None:
                tensor.zero_()

    def load(
        self, places: Sequence[int], rows: Sequence[Sequence[int]], ends: Sequence[int],
        noises: Sequence[Noise],
    ) -> None:  # fmt: skip
        """Put rows into these places, from their beginning; the script says nothing of them."""
        count, width, lengths = len(rows), max(map(len, rows)), list(map(len, rows))
        seeds, streams, temperatures = zip(*noises, strict=True)
        packed = [*places, *lengths, *(int(n < end) for n, end in zip(lengths, ends, strict=True)), *ends, *streams]
        for row in rows:
            packed += [*row, *[0] * (width - len(row))]
        keys = torch.tensor([seed if seed < 1 << 63 else seed - (1 << 64) for seed in seeds])
        parts = keys, torch.tensor(temperatures, dtype=torch.float32), integers(packed, torch.int32)
        both = torch.cat([part.view(torch.int32) for part in parts])
        sent = both.to(self.tokens.device)  # one copy: the host waits for each
        keys, heat, sent = sent[: 2 * count].view(torch.int64), sent[2 * count : 3 * count], sent[3 * count :]
        index, *lines = sent[: 5 * count].view(5, count)
        index = index.long()
        for tensor, line in zip((self.lengths[0], self.active[0], self.ends[0], self.streams), lines, strict=True):
            tensor.index_copy_(0, index, line)
        self.tokens[:, :width].index_copy_(0, index, sent[5 * count :].view(count, width))
        self.seeds.index_copy_(0, index, keys)
        self.temperatures.index_copy_(0, index, heat.view(torch.float32))
        self.failed.index_fill_(0, index, 0)
        for tensor in (self.script, self.cursor):
            if tensor is not None:
                tensor.index_fill_(1, index, 0)

    def let_go_on(self, places: Sequence[int], ends: Sequence[int]) -> None:
        """Only rows in these places take part from now on, up to these lengths."""
        batch = len(self.streams)
        going, until = [0] * batch, [0] * batch
        for place, end in zip(places, ends, strict=True):
            going[place], until[place] = 1, end
        self.active[0] = _line(going, batch)
        self.ends[0] = _line(until, batch)

    def take_over(self, other: RoundState) -> None:
        """What a smaller state holds, its rows in the same places."""
        rows, slots = other.tokens.shape
        self.tokens[:rows, :slots] = other.tokens
        for name in ("failed", "streams", "seeds", "temperatures"):
            getattr(self, name)[:rows] = getattr(other, name)
        for name in ("lengths", "active", "ends", "script", "cursor"):  # of every level
            if (theirs := getattr(other, name)) is not None:
                getattr(self, name)[:, :rows] = theirs

    def move(self, places: Sequence[int]) -> None:
        """Put the rows of these places first, in this order."""
        index = torch.tensor(places, device=self.tokens.device)
        for tensor, axis in (
            (self.tokens, 0), (self.lengths, 1), (self.active, 1), (self.ends, 1), (self.failed, 0), (self.streams, 0),
            (self.seeds, 0), (self.temperatures, 0), (self.script, 1), (self.cursor, 1),
        ):  # fmt: skip
            if tensor is not None:
                tensor.narrow(axis, 0, len(places)).copy_(tensor.index_select(axis, index))


def _line(values: Sequence[int], batch: int) -> Tensor:
    """int32 ``[batch]``, zeros behind the values."""
    return torch.tensor([*values, *[0] * (batch - len(values))], dtype=torch.int32)
