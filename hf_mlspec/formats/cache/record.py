"""How do keys and values of a token and key head lie in a cache that holds codes? What every cache format says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TAIL_BYTES = 4  # behind the codes of a row: what its codes stand for
LEAST = 2.0**-100  # of what a row's codes reach to: values and products of it stay normal numbers


@dataclass(frozen=True)
class CacheFormat:
    """One row of ``dtype`` for each key, and each value, of a token and key head: its codes, then TAIL_BYTES.

    word: what MLSpecConfig(kv_cache=...) and SpeculationConfig(draft_cache=...) call it. dtype: no other format has
    it. width: head_dim -> elements of a row, ValueError for a head_dim that it does not take; head_dim: back.
    quantize: floats ``[..., head_dim]`` -> ``[..., width]``; dequantize: back, as a dtype. on_gpus: whether the CUDA
    kernels read it.
    """

    word: str
    dtype: torch.dtype
    width: Callable[[int], int]
    head_dim: Callable[[int], int]
    quantize: Callable[[Tensor], Tensor]
    dequantize: Callable[[Tensor, torch.dtype], Tensor]
    on_gpus: bool


def checked_states(x: Tensor) -> Tensor:
    """Keys and values ``[..., head_dim]`` as float32. TypeError for another dtype, ValueError for a scalar and for
    rows without elements."""
    if not x.is_floating_point():
        raise TypeError(f"keys and values are floating-point numbers, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"keys and values have shape {list(x.shape)}, expected rows of at least one element")
    return x.float()


def checked_rows(rows: Tensor, word: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of a format -> their codes ``[..., n]`` and, aligned, the bytes behind them ``[..., TAIL_BYTES]``.
    TypeError for another dtype, ValueError for a scalar and for rows that hold no codes."""
    if rows.dtype != dtype:
        raise TypeError(f"rows of an {word} cache are {dtype}, not {rows.dtype}")
    if rows.ndim == 0 or rows.shape[-1] <= TAIL_BYTES:
        raise ValueError(f"rows have shape {list(rows.shape)}, expected codes and {TAIL_BYTES} bytes behind them")
    return rows[..., :-TAIL_BYTES], rows[..., -TAIL_BYTES:].clone(memory_format=torch.contiguous_format)
