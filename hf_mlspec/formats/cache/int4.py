"""How do keys and values become 4-bit codes? Asymmetric ones, between two ends per token and key head.

A row of ``dim`` elements, an even number, is ``dim / 2`` bytes of two codes each, the lower nibble first
(formats/packing.py), with the bfloat16 values of its two ends behind them, as the machine orders them:

    low = min(0, min x), high = max(0, max x), each rounded to bfloat16; 0 where its magnitude is below 2^-100
    code = round((min(max(x, low), high) - low) * (15 / (high - low))), ties to even, 0 where both ends are 0
    value = (low * (15 - code) + high * code) / 15

all in float32. Example: of -1, 0, 0.5, 2 the ends are -1 and 2, so that codes lie 0.2 apart: codes 0, 5, 8 (of 7.5)
and 15, values -1, 0, 0.6 and 2.

NaN, Inf, or ends that lie 2^120 or further apart make the ends NaN and the codes 0, so that whoever reads the row gets
NaN.

Why values that were quantized once stay: the ends are bfloat16 numbers, codes 0 and 15 are worth exactly them, and an
element that made an end has that code, since 0 between the ends makes their distance at least as large as either; so
the ends are found again. All other values lie less than half a code from what they were, even in bfloat16.

Source: asymmetric codes per token over each head, as QuaRot (arXiv 2404.00456, section 4; groups of head_dim) and Atom
(arXiv 2310.19102, section 4.4) keep them. Theirs store a scale and an offset and do not say what comes back from
values that were quantized before; the two ends, and 0 between them, are this package's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing import LARGEST_CODE, pack_nibbles, unpack_nibbles
from .record import LEAST, TAIL_BYTES, CacheFormat, checked_rows, checked_states

_WIDEST = 2.0**120  # 15 times an end is finite
_NAN = 0x7FC0  # a bfloat16; which one conversions make differs


def quantize(x: Tensor) -> Tensor:
    """Floats ``[..., dim]`` -> uint8 ``[..., dim / 2 + 4]``. TypeError for another dtype, ValueError for a scalar, for
    rows without elements and for an odd ``dim``."""
    x = checked_states(x)
    width(x.shape[-1])
    low, high = _end(x.amin(-1, keepdim=True).clamp(max=0.0)), _end(x.amax(-1, keepdim=True).clamp(min=0.0))
    distance = high - low
    small = distance < _WIDEST  # not so where an element is NaN or Inf
    most = torch.full_like(distance, LARGEST_CODE)  # of a number torch may multiply by a reciprocal
    codes = (x.maximum(low).minimum(high) - low) * (most / distance)
    codes = torch.where(small & (distance > 0), codes, 0.0).round().to(torch.uint8)
    ends = torch.cat([low, high], dim=-1).bfloat16().view(torch.int16)
    ends = torch.where(small, ends, torch.full_like(ends, _NAN))
    return torch.cat([pack_nibbles(codes), ends.contiguous().view(torch.uint8)], dim=-1)


def dequantize(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 ``[..., dim / 2 + 4]`` -> ``dtype`` ``[..., dim]``. TypeError for another dtype, ValueError for a scalar
    and for rows that hold no codes."""
    packed, tail = checked_rows(rows, INT4.word, INT4.dtype)
    low, high = tail.view(torch.bfloat16).float().split(1, dim=-1)
    codes = unpack_nibbles(packed).float()
    total = low * (LARGEST_CODE - codes) + high * codes  # both products are exact
    return (total / torch.full_like(low, LARGEST_CODE)).to(dtype)


def width(head_dim: int) -> int:
    """Bytes of a row; ValueError where the last byte would be half empty."""
    if head_dim % 2:
        raise ValueError(
            f"an int4 cache keeps two elements of a head in a byte, and heads have {head_dim}: choose 'int8', which "
            "takes any number, or None for keys and values as they are computed"
        )
    return head_dim // 2 + TAIL_BYTES


def _end(reach: Tensor) -> Tensor:
    rounded = reach.bfloat16().float()
    return torch.where(rounded.abs() < LEAST, 0.0, rounded)


INT4 = CacheFormat(
    "int4",
    torch.uint8,
    width=width,
    head_dim=lambda elements: 2 * (elements - TAIL_BYTES),
    quantize=quantize,
    dequantize=dequantize,
    on_gpus=True,
)
