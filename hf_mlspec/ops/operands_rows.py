"""Which operands may the ops of rows and of the ragged cache have? As operands.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .operands import check_dtype, check_float, check_same, check_shape, on_one_device

MAX_HEAD_DIM = 512  # of ragged_attention: a compiled kernel keeps its scores on the stack
_CACHE_DTYPES = (torch.float32, torch.bfloat16)


@on_one_device
def check_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    op = "rms_norm"
    check_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x is a scalar, it must have at least one axis")
    check_float(op, "weight", weight)
    check_shape(op, "weight", weight, x.shape[-1:])
    if residual is not None:
        check_same(op, "residual", residual, "x", x)


@on_one_device
def check_silu_mul(gate: Tensor, up: Tensor) -> None:
    check_float("silu_mul", "gate", gate)
    check_same("silu_mul", "up", up, "gate", gate)


@on_one_device
def check_rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, starts: Sequence[int], keys: Tensor, values: Tensor
) -> None:
    op = "rope_write"
    _check_cache(op, q, keys, values, starts)
    batch, tokens = q.shape[:2]
    check_dtype(op, "cos", cos, torch.float32)
    if cos.ndim != 2 or cos.shape[1] * 2 > q.shape[-1]:
        raise ValueError(
            f"{op}: cos has shape {list(cos.shape)}, expected [positions, rotary_dim / 2] with rotary_dim up to "
            f"{q.shape[-1]}"
        )
    check_same(op, "sin", sin, "cos", cos)
    for row, start in enumerate(starts):
        if start + tokens > cos.shape[0]:
            raise ValueError(
                f"{op}: row {row} reaches position {start + tokens - 1}, cos has positions 0 to {cos.shape[0] - 1}"
            )
    check_dtype(op, "k", k, q.dtype)
    check_shape(op, "k", k, (batch, tokens, keys.shape[1], q.shape[-1]))
    check_same(op, "v", v, "k", k)


@on_one_device
def check_ragged_attention(
    q: Tensor, keys: Tensor, values: Tensor, starts: Sequence[int], window: int, softcap: float
) -> None:
    op = "ragged_attention"
    _check_cache(op, q, keys, values, starts)
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"{op}: head_dim is {q.shape[-1]}, the kernel takes up to {MAX_HEAD_DIM}")
    if window < 0 or not softcap >= 0:
        raise ValueError(f"{op}: window is {window} and softcap {softcap}, both are 0 (none) or positive")


def _check_cache(op: str, q: Tensor, keys: Tensor, values: Tensor, starts: Sequence[int]) -> None:
    check_float(op, "q", q)
    for name, lanes in (("keys", keys), ("values", values)):
        if lanes.dtype not in _CACHE_DTYPES:
            raise TypeError(f"{op}: {name} is {lanes.dtype}, a cache is float32 or bfloat16")
        if lanes.ndim != 4:
            raise ValueError(
                f"{op}: {name} has shape {list(lanes.shape)}, expected [batch, kv_heads, slots, head_dim]"
            )
        if lanes.numel() and (lanes.stride(3) != 1 or lanes.stride(2) != lanes.shape[3]):
            raise ValueError(
                f"{op}: {name} of shape {list(lanes.shape)} is not contiguous in its last two axes (strides "
                f"{list(lanes.stride())})"
            )
    check_same(op, "values", values, "keys", keys)
    batch, kv_heads, slots, dim = keys.shape
    if q.ndim != 4 or q.shape[0] != batch or q.shape[3] != dim or not kv_heads or q.shape[2] % kv_heads:
        raise ValueError(
            f"{op}: q has shape {list(q.shape)}, the cache takes [{batch}, tokens, a multiple of {kv_heads} heads, "
            f"{dim}]"
        )
    if len(starts) != batch:
        raise ValueError(f"{op}: {len(starts)} starts for {batch} rows")
    for row, start in enumerate(starts):
        if not 0 <= start <= slots - q.shape[1]:
            raise ValueError(
                f"{op}: row {row} starts at {start} and has {q.shape[1]} tokens, the cache has slots 0 to {slots - 1}"
            )
