"""Which operands does `zipper_high_linear` refuse, and in which words? On any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What is put in place of fitting operands (two rows of 64 inputs, 8 outputs), the error, and what it says.
BAD_OPERANDS: list[tuple[dict[str, Tensor], type[Exception], str]] = [
    ({"x": torch.zeros(2, 62)}, ValueError, r"x has shape \[2, 62\], a high part has multiples of 32 inputs"),
    ({"x": torch.zeros(2, 64, dtype=torch.int8)}, TypeError, "x is .*, expected float32, bfloat16"),
    ({"low": torch.zeros(3, 8)}, ValueError, r"low has shape \[3, 8\], expected \[2, 8\]"),
    ({"low": torch.zeros(2, 8).half()}, TypeError, "low is"),
    ({"low": torch.zeros(8, 2).T}, ValueError, "low of shape .* is not contiguous"),
    ({"high": torch.zeros(9, dtype=torch.int32)}, ValueError, r"high has shape \[9\], expected"),
    ({"high": torch.zeros(99, dtype=torch.int64)}, TypeError, "high is"),
    ({"bias": torch.zeros(7)}, ValueError, r"bias has shape \[7\], expected \[8\]"),
]


def bad_operands(split: Tensor, change: dict[str, Tensor], device: str = "cpu") -> list[Any]:
    """x, low, high and bias on a device, of which ``change`` replaces some; split: of a weight ``[8, 64]`` in tiles.
    Strides stay: `Tensor.to` would keep those of a transposed tensor, too."""
    given = {"x": torch.zeros(2, 64), "low": torch.zeros(2, 8), "high": split, "bias": None} | change
    return [value if value is None else _moved(value, device) for value in given.values()]


def _moved(value: Tensor, device: str) -> Tensor:
    there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return there.copy_(value)
