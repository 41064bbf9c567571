"""Where do the keys and values of a compiled decoder live? In one tensor, which rows and slots are added to."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.device_decoder import DeviceDecoder
from ..nn.fused import FusedDecoder

GROWTH = 256  # slots; a cache grows by half, to a multiple of this


class FusedCache:
    """Keys and values of a batch in one tensor `[layers, 2, batch, kv_heads, slots, head_dim]`, rows of any length.

    The first `rows` of its batch are in use; what lies beyond waits for `extend_rows`.
    """

    def __init__(self, kv: Tensor, rows: int):
        self.kv, self.rows = kv, rows

    @classmethod
    def new(cls, decoder: FusedDecoder | DeviceDecoder, batch: int, capacity: int) -> FusedCache:
        """An empty cache for `batch` rows of `capacity` slots or a few more."""
        return cls(decoder.new_kv(batch, up_to_growth(capacity)), batch)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots a row, and for half as many again as there were where there is memory for those.

        torch.OutOfMemoryError names rows and slots where a GPU has none.
        """
        have = self.kv.shape[4]
        if slots <= have:
            return
        try:
            self._grow(up_to_growth(max(slots, have + have // 2)))
        except torch.OutOfMemoryError:
            self._grow_barely(up_to_growth(slots))

    def _grow(self, slots: int) -> None:
        self.kv = torch.nn.functional.pad(self.kv[:, :, : self.rows], (0, 0, 0, slots - self.kv.shape[4]))

    def _grow_barely(self, slots: int) -> None:
        try:
            self._grow(slots)
        except torch.OutOfMemoryError as error:
            gib = self.nbytes / 2**30
            raise torch.OutOfMemoryError(
                f"no memory for {slots} tokens in each of {self.rows} rows beside a cache of {gib:.2f} GiB, "
                f"{self.kv.shape[4]} so far: ask for fewer new tokens or rows, or free what else is on the device "
                f"({str(error).splitlines()[0]})"
            ) from error

    def select(self, keep: list[int]) -> None:
        """Keep the rows of these indices only, in this order. Only rows that change their place are copied, and the
        memory of the others stays for `extend_rows`."""
        moves = [(place, row) for place, row in enumerate(keep) if place != row]
        if all(row > place for place, row in moves):  # then none is overwritten before it is read
            for place, row in moves:
                self.kv[:, :, place] = self.kv[:, :, row]
        else:
            self.kv[:, :, : len(keep)] = self.kv[:, :, keep]
        self.rows = len(keep)

    def extend_rows(self, count: int) -> None:
        """Append `count` rows. What their slots hold is nobody's: a query sees the slots of its own row only, and of
        them those that were written before it."""
        missing = self.rows + count - self.kv.shape[2]
        if missing > 0:
            self.kv = torch.nn.functional.pad(self.kv, (0, 0, 0, 0, 0, 0, 0, missing))
        self.rows += count

    def shrink(self, slots: int) -> None:
        """Copy the rows to memory for `slots` slots of each, where that halves it or better."""
        slots = min(up_to_growth(slots), self.kv.shape[4])
        if 2 * self.rows * slots <= self.kv.shape[2] * self.kv.shape[4]:
            self.kv = self.kv[:, :, : self.rows, :, :slots].clone(memory_format=torch.contiguous_format)

    def load(self, other, length: int) -> None:
        """Copy the first `length` slots of every layer of a plain transformers cache (as many rows, no padding)."""
        self.reserve(length)
        for layer, (keys, values) in zip(other.layers, self.kv, strict=False):
            keys[: self.rows, :, :length] = layer.keys[:, :, :length]
            values[: self.rows, :, :length] = layer.values[:, :, :length]

    def row(self, index: int, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of slots `start` .. `end` of a row: of every layer keys and values `[kv_heads, slots, head_dim]`."""
        return [(keys.clone(), values.clone()) for keys, values in self.kv[:, :, index, :, start:end]]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.kv.nbytes


def up_to_growth(slots: int) -> int:
    """`slots`, or the next multiple of what caches grow by."""
    return slots - slots % -GROWTH
