"""How does a step of the CUDA decoder read other bits in every block, and for every row?

A block is the attention or the MLP of a layer: of layer i blocks 2 i and 2 i + 1. Rows that read the same bits of a
block are multiplied together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...precision import OWN_BITS, Bits

Multiply = Callable[[Tensor, Bits], Tensor]


class Groups(NamedTuple):
    """Tokens of a step by what they read: (int64 ``[n]``, places in the flattened step; bits)."""

    parts: tuple[tuple[Tensor, Bits], ...]


class BlockBits(Protocol):
    """Bits of every block of a call, chosen before or on the way. key: names them, for a graph. widest: the most."""

    key: tuple
    widest: Bits

    def at(self, block: int, x: Tensor) -> Bits | Groups:
        """Of a block whose linears are about to read ``[tokens, in]``."""


class RowBits:
    """Known widths of rows: ``widths[r][j]`` planes of block j for row r; every row has as many tokens of a step."""

    def __init__(self, widths: Sequence[Sequence[int]], device: torch.device):
        self.key = tuple(map(tuple, widths))
        self.widest = Bits(max(map(max, self.key)), 16)
        self._device = device
        self._of_block = list(zip(*self.key, strict=True))
        self._groups: dict[tuple, Groups] = {}  # they stay: graphs hold their addresses

    def at(self, block: int, x: Tensor) -> Bits | Groups:
        """As `BlockBits.at`."""
        own = self._of_block[block]
        if len(set(own)) == 1:
            return Bits(own[0], 16)
        each = len(x) // len(own)
        if (own, each) not in self._groups:
            self._groups[own, each] = self._grouped(own, each)
        return self._groups[own, each]

    def _grouped(self, own: tuple[int, ...], each: int) -> Groups:
        places = torch.arange(len(own) * each).view(len(own), each)
        rows = {width: [row for row, has in enumerate(own) if has == width] for width in sorted(set(own))}
        return Groups(
            tuple((places[which].flatten().to(self._device), Bits(width, 16)) for width, which in rows.items())
        )


def times(linear: Multiply, x: Tensor, bits: Bits | Groups) -> Tensor:
    """``[n, in]`` -> ``[n, out]``, every token at its own bits."""
    if isinstance(bits, Bits):
        return linear(x, bits)
    out = None
    for places, own in bits.parts:
        part = linear(x.index_select(0, places), own)
        out = part.new_empty(len(x), part.shape[1]) if out is None else out
        out.index_copy_(0, places, part)
    return out


def outside(bits: Bits | BlockBits) -> Bits:
    """What linears read that are in no block."""
    return bits if isinstance(bits, Bits) else OWN_BITS


def at(bits: Bits | BlockBits, block: int, x: Tensor) -> Bits | Groups:
    """What the linears of a block read of ``[tokens, in]``."""
    return bits if isinstance(bits, Bits) else bits.at(block, x)
