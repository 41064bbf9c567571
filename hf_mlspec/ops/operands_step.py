"""Which operands may the ops of a step have? As operands.py; what stands in device memory is not looked at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .operands import check_dtype, check_same, check_shape, on_one_device

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2, "relu": 3}  # mlspec_activation
# Of the CUDA kernels: what their registers hold, and the depth of one tensor-core instruction.
CUDA_MAX_HEAD_DIM, CUDA_HEAD_DIM_STEP = 256, 16
_FLOATS = (torch.float32, torch.bfloat16)


@on_one_device
def check_embed_rows(ids: Tensor, table: Tensor, scale: float) -> None:
    op = "embed_rows"
    _check_lengths(op, "ids", ids, None)
    _check_float(op, "table", table)
    if table.ndim != 2 or not len(table):
        raise ValueError(
            f"{op}: table has shape {list(table.shape)}, expected [vocab, hidden] with a vocab of 1 or more"
        )
    _check_contiguous(op, "table", table)
    if not math.isfinite(scale):
        raise ValueError(f"{op}: scale is {scale}, expected a finite number (1.0: the table's rows as they are)")


@on_one_device
def check_gated(gate_up: Tensor, activation: int) -> None:
    op = "gated"
    _check_float(op, "gate_up", gate_up)
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"{op}: gate_up has shape {list(gate_up.shape)}, expected [n, 2 * intermediate]")
    if activation not in ACTIVATIONS.values():
        raise ValueError(f"{op}: activation is {activation}, choose one of {ACTIVATIONS}")


@on_one_device
def check_rope_write_rows(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor,
    counts: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> None:
    op = "rope_write_rows"
    _check_float(op, "qkv", qkv)
    batch, kv_heads, _, dim = _check_cache(op, keys, values)
    width = (heads + 2 * kv_heads) * dim
    if heads < 1 or qkv.ndim != 3 or qkv.shape[0] != batch or qkv.shape[2] != width:
        raise ValueError(
            f"{op}: qkv has shape {list(qkv.shape)}, expected [{batch}, width, (heads + 2 * {kv_heads}) * {dim}] = "
            f"[{batch}, width, {width}] for {heads} heads"
        )
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_dtype(op, name, norm, torch.float32)
            check_shape(op, name, norm, (dim,))
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}, expected 0 or a positive number")
    check_dtype(op, "cos", cos, torch.float32)
    if cos.ndim != 2 or cos.shape[1] * 2 > dim:
        raise ValueError(
            f"{op}: cos has shape {list(cos.shape)}, expected [positions, rotary_dim / 2] with rotary_dim up to {dim}"
        )
    check_same(op, "sin", sin, "cos", cos)
    for name, table in (("cos", cos), ("sin", sin)):
        _check_contiguous(op, name, table)
    _check_lengths(op, "starts", starts, batch)
    _check_lengths(op, "counts", counts, batch)


@on_one_device
def check_ragged_attention_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    op = "ragged_attention_rows"
    _check_float(op, "q", q)
    batch, kv_heads, _, dim = _check_cache(op, keys, values)
    if q.ndim != 4 or q.shape[0] != batch or q.shape[3] != dim or not kv_heads or q.shape[2] % kv_heads:
        raise ValueError(
            f"{op}: q has shape {list(q.shape)}, the cache takes [{batch}, width, a multiple of {kv_heads} heads, "
            f"{dim}]"
        )
    _check_lengths(op, "starts", starts, batch)
    _check_lengths(op, "counts", counts, batch)
    if not math.isfinite(scale):
        raise ValueError(f"{op}: scale is {scale}, expected a finite number")
    if window < 0:
        raise ValueError(f"{op}: window is {window}, expected 0 (none) or a number of slots")
    _check_softcap(op, softcap)


@on_one_device
def check_choose_rows(
    logits: Tensor, softcap: float, seed: Tensor | None, streams: Tensor | None, positions: Tensor | None
) -> None:
    op = "choose_rows"
    _check_float(op, "logits", logits)
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"{op}: logits has shape {list(logits.shape)}, expected [n, vocab] with a vocab of 1 or more")
    _check_softcap(op, softcap)
    given = {name for name, value in (("seed", seed), ("streams", streams), ("positions", positions))
             if value is not None}  # fmt: skip
    if given and len(given) < 3:
        raise ValueError(f"{op}: {' and '.join(sorted(given))} given alone; noise needs seed, streams and positions")
    if given:
        check_dtype(op, "seed", seed, torch.int64)
        check_shape(op, "seed", seed, (1,))
        _check_lengths(op, "streams", streams, len(logits))
        _check_lengths(op, "positions", positions, len(logits))


def _check_float(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{op}: {name} is {tensor.dtype}, expected float32 or bfloat16")


def _check_softcap(op: str, softcap: float) -> None:
    if not 0 <= softcap < math.inf:
        raise ValueError(f"{op}: softcap is {softcap}, expected 0 (none) or a positive number")


def _check_lengths(op: str, name: str, tensor: Tensor, count: int | None) -> None:
    """int32, dense, `[count]` (any count if None)."""
    check_dtype(op, name, tensor, torch.int32)
    if tensor.ndim != 1 or (count is not None and len(tensor) != count):
        expected = "[n]" if count is None else f"[{count}]"
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}, expected {expected}")
    _check_contiguous(op, name, tensor)


def _check_cache(op: str, keys: Tensor, values: Tensor) -> torch.Size:
    """The shape of both."""
    for name, lanes in (("keys", keys), ("values", values)):
        _check_float(op, name, lanes)
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
    dim = keys.shape[3]
    if keys.is_cuda and not (0 < dim <= CUDA_MAX_HEAD_DIM and dim % CUDA_HEAD_DIM_STEP == 0):
        raise ValueError(
            f"{op}: head_dim is {dim}, the CUDA kernels take multiples of {CUDA_HEAD_DIM_STEP} up to "
            f"{CUDA_MAX_HEAD_DIM}"
        )
    return keys.shape


def _check_contiguous(op: str, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {name} of shape {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())}); call "
            ".contiguous() once and keep the result"
        )
