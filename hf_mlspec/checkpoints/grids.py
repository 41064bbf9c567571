"""Which integers and which step are behind floats that were quantized and multiplied out again?

Of a group only the values are known: v = round(k * step) in their own dtype. The largest of them is a guess at the
step, step = |v| / k for every k it may have; a guess holds if one step lies within the bounds that all values set, and
if multiplying out with it gives every value again. Quantizers that clip use their largest integer, so the
largest k is tried first. Groups that use few integers may fit several grids: all mean the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ELEMENTS = 1 << 19  # in flight, of float64


class Grid(NamedTuple):
    """codes int8 ``[n, size]``; step float32 ``[n]``, a float16 number where one fits; fits bool ``[n]``: whether
    code * step, rounded to the values' dtype, is every value. A group of zeros has step 1."""

    codes: Tensor
    step: Tensor
    fits: Tensor


def recover_grid(groups: Tensor, low: int, high: int, largest: Sequence[int]) -> Grid:
    """Floats ``[n, size]``, float16, bfloat16 or float32, finite -> integers ``low`` to ``high`` and a step a group.

    largest: magnitudes that the largest value of a group may have as an integer, in the order in which they are tried.
    """
    rows, size = groups.shape
    codes, fits = torch.zeros(rows, size, dtype=torch.int8), torch.zeros(rows, dtype=torch.bool)
    grid = Grid(codes, torch.ones(rows), fits)
    step = max(1, _ELEMENTS // max(size, 1))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        _recover(groups[part], low, high, largest, Grid(*(whole[part] for whole in grid)))
    return grid


def _recover(groups: Tensor, low: int, high: int, largest: Sequence[int], grid: Grid) -> None:
    top = groups.abs().amax(-1)
    grid.fits[top == 0] = True
    for code in largest:
        pending = (~grid.fits).nonzero().squeeze(-1)
        if not pending.numel():
            return
        values = groups[pending]
        codes, below, above = _guess(values, top[pending].double() / code, low, high)
        middle = (below + above) / 2
        for step in (middle.to(torch.float16).float(), middle.float()):
            same = ((codes * step.double().unsqueeze(-1)).to(values.dtype) == values).all(-1)
            new = same & (step > 0) & (below <= above) & ~grid.fits[pending]
            at = pending[new]
            grid.codes[at], grid.step[at], grid.fits[at] = codes[new].to(torch.int8), step[new], True


def _guess(values: Tensor, step: Tensor, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers float64 ``[n, size]`` by ``step`` ``[n]``, and the bounds ``[n]`` of the true step by all values."""
    sizes = values.abs()
    wide = sizes.double()
    codes = (wide / step.unsqueeze(-1)).round().clamp(max=max(-low, high))
    codes = torch.where(values < 0, codes.clamp(max=-low), codes.clamp(max=high))
    words = sizes.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)
    under = ((words - 1).clamp(min=0).view(values.dtype).double() + wide) / 2  # halfway to the neighbours
    over = ((words + 1).view(values.dtype).double() + wide) / 2
    some = codes > 0
    below = torch.where(some, under / codes, 0.0).amax(-1)
    above = torch.where(some, over / codes, torch.inf).amin(-1)
    return torch.where(values < 0, -codes, codes), below, above
