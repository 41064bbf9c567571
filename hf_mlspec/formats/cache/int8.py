"""How do keys and values become int8 codes? Symmetric ones, with a scale per token and key head.

A row of ``dim`` elements is ``dim`` int8 codes with the four bytes of a float32 scale behind them, as the machine
orders them:

    largest = max|x|, rounded to bfloat16        scale = largest / 127
    code = round(x * (127 / largest)), ties to even          value = code * scale

all in float32. Example: a row whose largest magnitude is 2 has scale 2 / 127; 1.0 becomes round(63.5) = 64, worth
1.0079.

A row whose largest magnitude is below 2^-100 has scale and codes 0. NaN, Inf, or a largest magnitude that is no finite
bfloat16 makes the scale NaN and the codes 0, so that whoever reads the row gets NaN.

Why values that were quantized once stay: ``largest`` is a bfloat16, so that values in float32, and in bfloat16, where
each is rounded by less than half a code, have the codes and the scale they came from.

Source: symmetric codes with a scale per token and head, as in FlexGen (arXiv 2303.06865, section 5), QuaRot (arXiv
2404.00456, section 4) and Atom (arXiv 2310.19102, section 4.4), which go to 4 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .record import LEAST, TAIL_BYTES, CacheFormat, checked_rows, checked_states

_LARGEST_CODE = 127.0


def quantize(x: Tensor) -> Tensor:
    """Floats ``[..., dim]`` -> int8 ``[..., dim + 4]``. TypeError for another dtype, ValueError for a scalar and for
    rows without elements."""
    x = checked_states(x)
    largest = x.abs().amax(-1, keepdim=True).bfloat16().float()
    finite = largest.isfinite()
    coded = finite & (largest >= LEAST)
    most = torch.full_like(largest, _LARGEST_CODE)  # by a number, or of one, torch may multiply by a reciprocal
    factor = most / largest
    codes = torch.where(coded, x * factor, 0.0).round().to(torch.int8)
    scale = torch.where(coded, largest / most, torch.where(finite, 0.0, torch.nan))
    return torch.cat([codes, scale.contiguous().view(torch.int8)], dim=-1)


def dequantize(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """int8 ``[..., dim + 4]`` -> ``dtype`` ``[..., dim]``. TypeError for another dtype, ValueError for a scalar and
    for rows that hold no codes."""
    codes, tail = checked_rows(rows, INT8.word, INT8.dtype)
    return (codes.float() * tail.view(torch.float32)).to(dtype)


INT8 = CacheFormat(
    "int8",
    torch.int8,
    width=lambda head_dim: head_dim + TAIL_BYTES,
    head_dim=lambda width: width - TAIL_BYTES,
    quantize=quantize,
    dequantize=dequantize,
    on_gpus=True,
)
