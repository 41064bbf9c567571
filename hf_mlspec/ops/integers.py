"""How do thousands of Python integers become a tensor? As memory that an array filled: torch looks at each twice."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

_CODES = {torch.int32: "i", torch.int64: "q"}


def integers(values: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor ``[n]`` on the host, int32 or int64. OverflowError or TypeError for a value that is none."""
    held = array(_CODES[dtype], values)
    return torch.frombuffer(held, dtype=dtype) if held else torch.empty(0, dtype=dtype)
