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


class Chosen(NamedTuple):
    """Planes of a step's tokens where the host does not know them: int32 ``[1]`` of all, or one for each. likely: of
    planes that are streamed as many are to be there, and no more need be read; others always are."""

    widths: Tensor
    likely: int = 0


BitsOfBlock = Bits | Groups | Chosen


class BlockBits(Protocol):
    """Bits of every block of a call, chosen before or on the way. key: names them, for a graph. widest: the most.
    waits: the host learns them on the way, so that no graph holds the call."""

    key: tuple
    widest: Bits
    waits: bool

    def at(self, block: int, x: Tensor, starts: Tensor) -> BitsOfBlock:
        """Of a block whose linears are about to read ``[tokens, in]``, as many of every row, from starts[r] on."""


class RowBits:
    """Known widths of rows: ``widths[r][j]`` planes of block j for row r; every row has as many tokens of a step."""

    waits = False

    def __init__(self, widths: Sequence[Sequence[int]], device: torch.device):
        self.key = tuple(map(tuple, widths))
        self.widest = Bits(max(map(max, self.key)), 16)
        self._device = device
        self._of_block = list(zip(*self.key, strict=True))
        self._groups: dict[tuple, Groups] = {}  # they stay: graphs hold their addresses

    def at(self, block: int, x: Tensor, starts: Tensor) -> Bits | Groups:
        """As `BlockBits.at`."""
        own = self._of_block[block]
        if len(set(own)) == 1:
            return Bits(own[0], 16)
        each = len(x) // len(own)
        if (own, each) not in self._groups:
            self._groups[own, each] = self._grouped(own, each)
        return self._groups[own, each]

    def _grouped(self, own: tuple[int, ...], each: int) -> Groups:
        return grouped([width for width in own for _ in range(each)], self._device)


def grouped(widths: Sequence[int], device: torch.device) -> Groups:
    """Tokens by their numbers of planes."""
    places = {width: [at for at, own in enumerate(widths) if own == width] for width in sorted(set(widths))}
    return Groups(tuple((torch.tensor(which, device=device), Bits(width, 16)) for width, which in places.items()))


def times(linear: Multiply, x: Tensor, bits: BitsOfBlock) -> Tensor:
    """``[n, in]`` -> ``[n, out]``, every token at its own bits."""
    if isinstance(bits, Bits):
        return linear(x, bits)
    if isinstance(bits, Chosen):
        return linear.chosen(x, *bits)
    out = None
    for places, own in bits.parts:
        part = linear(x.index_select(0, places), own)
        out = part.new_empty(len(x), part.shape[1]) if out is None else out
        out.index_copy_(0, places, part)
    return out


def outside(bits: Bits | BlockBits) -> Bits:
    """What linears read that are in no block."""
    return bits if isinstance(bits, Bits) else OWN_BITS


def at(bits: Bits | BlockBits, block: int, x: Tensor, starts: Tensor) -> BitsOfBlock:
    """What the linears of a block read of ``[tokens, in]``, rows from ``starts`` on."""
    return bits if isinstance(bits, Bits) else bits.at(block, x, starts)
