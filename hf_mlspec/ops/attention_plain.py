"""What do attention and its rotation compute in plain torch, on the tokens of one row?"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import CacheFormat, stored_format
from .operator import CACHE_FLOATS

FIRST_SLOTS = 64  # that every token sees behind a draft window


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads ``[tokens, heads, dim]``, cos and sin ``[tokens, rotary_dim / 2]``: halves against each other."""
    half = cos.shape[1]
    first, second, rest = heads.float().split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int, softcap: float, draft_window: int,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q ``[tokens, heads, dim]`` from slot ``start`` on, keys and values ``[kv_heads, slots, dim]`` as they are or in
    codes -> float32 ``[tokens, heads, dim]``; the rest as of `ops.ragged_attention_rows`."""
    groups = q.shape[1] // keys.shape[0]
    query = q.float().transpose(0, 1)  # [heads, tokens, dim]
    keys, values = values_of(keys), values_of(values)
    scores = query @ keys.repeat_interleave(groups, 0).transpose(1, 2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    position = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
    slot = torch.arange(keys.shape[1], device=q.device)
    hidden = slot > position
    if window:
        hidden |= slot <= position - window
    if draft_window:
        hidden |= (slot >= FIRST_SLOTS) & (slot <= position - draft_window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        last = sinks[:, None, None].expand(-1, len(position), 1)
        weights = torch.cat([scores, last], dim=-1).softmax(-1)[..., :-1]
    return (weights @ values.repeat_interleave(groups, 0)).transpose(0, 1)


def codes_of(dtype: torch.dtype) -> CacheFormat | None:
    """The format of a cache of this dtype, None where it holds keys and values as they are."""
    return None if dtype in CACHE_FLOATS else stored_format(dtype)


def stored(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values ``[..., dim]`` as a cache of this dtype holds them."""
    codes = codes_of(dtype)
    return states.to(dtype) if codes is None else codes.quantize(states)


def values_of(lanes: Tensor) -> Tensor:
    """What a cache holds, float32 ``[..., dim]``."""
    codes = codes_of(lanes.dtype)
    return lanes.float() if codes is None else codes.dequantize(lanes, torch.float32)
