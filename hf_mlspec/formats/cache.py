"""In which codes are keys and values kept? One record a format, in CACHE_FORMATS: ``"int8"``.

Every token has one row for each key head, of its key and of its value, quantized for itself. A row of ``dim`` elements
is ``dim`` int8 codes with the four bytes of a float32 scale behind them, as the machine orders them:

    largest = max|x|, rounded to bfloat16        scale = largest / 127
    code = round(x * (127 / largest)), ties to even          value = code * scale

all in float32. Example: a row whose largest magnitude is 2 has scale 2 / 127; 1.0 becomes round(63.5) = 64, worth
1.0079.

A row whose largest magnitude is below 2^-100 has scale and codes 0. NaN, Inf, or a largest magnitude that is no finite
bfloat16 makes the scale NaN and the codes 0, so that whoever reads the row gets NaN.

Values that were quantized once stay as they are: ``largest`` is a bfloat16, so that values in float32, and in
bfloat16, where each is rounded by less than half a code, have the codes and the scale they came from. So a cache can
leave as plain keys and values and come back bit for bit. The compiled kernels follow this rule bit for bit.

Source: symmetric codes with a scale per token and head, as in FlexGen (arXiv 2303.06865, section 5), QuaRot (arXiv
2404.00456, section 4) and Atom (arXiv 2310.19102, section 4.4), which go to 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LARGEST_CODE = 127.0
_SCALE_BYTES = 4
_LEAST = 2.0**-100  # of a row that is not zeros: values and products of it stay normal numbers


@dataclass(frozen=True)
class CacheFormat:
    """How keys and values of a token and key head lie in a cache: one row of ``dtype`` each.

    word: what MLSpecConfig(kv_cache=...) and SpeculationConfig(draft_cache=...) call it. dtype: no other format has
    it. width: head_dim -> elements of a row; head_dim: back. quantize: floats ``[..., head_dim]`` -> ``[..., width]``;
    dequantize: back, as a dtype.
    """

    word: str
    dtype: torch.dtype
    width: Callable[[int], int]
    head_dim: Callable[[int], int]
    quantize: Callable[[Tensor], Tensor]
    dequantize: Callable[[Tensor, torch.dtype], Tensor]


def quantize(x: Tensor) -> Tensor:
    """Floats ``[..., dim]`` -> int8 ``[..., dim + 4]``. TypeError for another dtype, ValueError for a scalar and for
    rows without elements."""
    if not x.is_floating_point():
        raise TypeError(f"keys and values are floating-point numbers, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"keys and values have shape {list(x.shape)}, expected rows of at least one element")
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True).bfloat16().float()
    finite = largest.isfinite()
    coded = finite & (largest >= _LEAST)
    most = torch.full_like(largest, _LARGEST_CODE)  # by a number, or of one, torch may multiply by a reciprocal
    factor = most / largest
    codes = torch.where(coded, x * factor, 0.0).round().to(torch.int8)
    scale = torch.where(coded, largest / most, torch.where(finite, 0.0, torch.nan))
    return torch.cat([codes, scale.contiguous().view(torch.int8)], dim=-1)


def dequantize(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """int8 ``[..., dim + 4]`` -> ``dtype`` ``[..., dim]``. TypeError for another dtype, ValueError for a scalar and
    for rows that hold no codes."""
    if rows.dtype != torch.int8:
        raise TypeError(f"rows of an int8 cache are torch.int8, not {rows.dtype}")
    if rows.ndim == 0 or rows.shape[-1] <= _SCALE_BYTES:
        raise ValueError(f"rows have shape {list(rows.shape)}, expected codes and {_SCALE_BYTES} bytes of a scale")
    scale = rows[..., -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned
    return (rows[..., :-_SCALE_BYTES].float() * scale).to(dtype)


INT8 = CacheFormat(
    "int8",
    torch.int8,
    width=lambda head_dim: head_dim + _SCALE_BYTES,
    head_dim=lambda width: width - _SCALE_BYTES,
    quantize=quantize,
    dequantize=dequantize,
)

CACHE_FORMATS: dict[str, CacheFormat] = {record.word: record for record in (INT8,)}


def cache_format(word: Any, said: str) -> CacheFormat | None:
    """The format of a word, None for None: keys and values as the model computes them. ``said`` begins the message:
    the option. ValueError for a word that there is not, TypeError for what is no word."""
    if word is None:
        return None
    if not isinstance(word, str):
        raise TypeError(f"{said} is {word!r}, expected a word ({', '.join(map(repr, CACHE_FORMATS))}) or None")
    if word not in CACHE_FORMATS:
        choices = " or ".join(map(repr, CACHE_FORMATS))
        raise ValueError(f"{said} is {word!r}, choose {choices}, or None for keys and values as they are computed")
    return CACHE_FORMATS[word]


def stored_format(dtype: torch.dtype) -> CacheFormat | None:
    """The format whose rows a cache of this dtype holds, None where it holds keys and values as they are."""
    return next((record for record in CACHE_FORMATS.values() if record.dtype == dtype), None)
