"""How do tokens get into a ragged cache, and what do they attend to? Every row of it has a length of its own.

``rope_write`` and ``ragged_attention`` know the lengths. In their ``*_rows``, which a step of a whole model on a
device is made of, int32 ``starts`` and ``counts`` ``[batch]`` say where a row stands: token t of row r has position
and cache slot ``starts[r] + t`` and is real where ``t < counts[r]``; the others are padding. For padding nothing is
written, and its results are zeros. As lengths are read on the device, these ops only enqueue and can be captured; what
would be an error on the CPU (a real token behind the last slot or position) is padding there. Their plain torch reads
lengths back for every call and computes row by row: a token's bits do not depend on what stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats import stored_format
from .attention_plain import attend, codes_of, rotate, stored
from .operator import CACHE_FLOATS, Operands, operator
from .rows import rms_norm

MAX_HEAD_DIM = 512  # of ragged_attention: a compiled kernel keeps its scores on the stack
# Of the CUDA kernels: what their registers hold, and the depth of one tensor-core instruction.
CUDA_MAX_HEAD_DIM, CUDA_HEAD_DIM_STEP = 256, 16


def _check_cache(given: Operands, q: str | None, width: str) -> torch.Size:
    """``[batch, kv_heads, slots, head_dim]`` of keys and values, which ``q`` fits; width: how the axis of its tokens
    is called."""
    for name in ("keys", "values"):
        lanes = vars(given)[name]
        if lanes.dtype not in CACHE_FLOATS and stored_format(lanes.dtype) is None:
            raise TypeError(f"{given.op}: {name} is {lanes.dtype}, a cache is float32, bfloat16, int8 or uint8")
        if lanes.ndim != 4:
            raise ValueError(
                f"{given.op}: {name} has shape {list(lanes.shape)}, expected [batch, kv_heads, slots, head_dim]"
            )
        if lanes.numel() and (lanes.stride(3) != 1 or lanes.stride(2) != lanes.shape[3]):
            raise ValueError(
                f"{given.op}: {name} of shape {list(lanes.shape)} is not contiguous in its last two axes (strides "
                f"{list(lanes.stride())})"
            )
    given.require_same("values", "keys")
    batch, kv_heads, slots, _ = given.keys.shape
    dim = _head_dim(given.keys)
    codes = codes_of(given.keys.dtype)
    if codes is not None and dim < 1:
        raise ValueError(
            f"{given.op}: keys has shape {list(given.keys.shape)}, rows of an {codes.word} cache are codes and "
            f"{codes.width(0)} bytes behind them"
        )
    shape = vars(given)[q].shape if q else None
    if q and (len(shape) != 4 or shape[0] != batch or shape[3] != dim or not kv_heads or shape[2] % kv_heads):
        raise ValueError(
            f"{given.op}: {q} has shape {list(shape)}, the cache takes [{batch}, {width}, a multiple of {kv_heads} "
            f"heads, {dim}]"
        )
    return torch.Size((batch, kv_heads, slots, dim))


def _check_starts(given: Operands) -> None:
    """Of rows whose lengths are known, with q and its cache."""
    given.require_float("q")
    batch, _, slots, _ = _check_cache(given, "q", "tokens")
    tokens = given.q.shape[1]
    if len(given.starts) != batch:
        raise ValueError(f"{given.op}: {len(given.starts)} starts for {batch} rows")
    for row, start in enumerate(given.starts):
        if not 0 <= start <= slots - tokens:
            raise ValueError(
                f"{given.op}: row {row} starts at {start} and has {tokens} tokens, the cache has slots 0 to "
                f"{slots - 1}"
            )


def _check_rows(given: Operands, q: str | None) -> torch.Size:
    """The cache's shape; with starts and counts on the device, which are not looked at."""
    batch, _, _, dim = shape = _check_cache(given, q, "width")
    if given.keys.is_cuda and not (0 < dim <= CUDA_MAX_HEAD_DIM and dim % CUDA_HEAD_DIM_STEP == 0):
        raise ValueError(
            f"{given.op}: head_dim is {dim}, the CUDA kernels take multiples of {CUDA_HEAD_DIM_STEP} up to "
            f"{CUDA_MAX_HEAD_DIM}"
        )
    given.require_numbers("starts", batch)
    given.require_numbers("counts", batch)
    return shape


def _check_rotary(given: Operands, dim: int) -> None:
    given.require_dtype("cos", torch.float32)
    cos = given.cos
    if cos.ndim != 2 or cos.shape[1] * 2 > dim:
        raise ValueError(
            f"{given.op}: cos has shape {list(cos.shape)}, expected [positions, rotary_dim / 2] with rotary_dim up to "
            f"{dim}"
        )
    given.require_same("sin", "cos")


def _check_rope_write(given: Operands) -> None:
    _check_starts(given)
    batch, tokens, _, dim = given.q.shape
    _check_rotary(given, dim)
    for row, start in enumerate(given.starts):
        if start + tokens > len(given.cos):
            raise ValueError(
                f"{given.op}: row {row} reaches position {start + tokens - 1}, cos has positions 0 to "
                f"{len(given.cos) - 1}"
            )
    given.require_dtype("k", given.q.dtype)
    given.require_shape("k", (batch, tokens, given.keys.shape[1], dim))
    given.require_same("v", "k")


@operator(_check_rope_write, lambda given: given.q.new_empty(given.q.shape), writes=("keys", "values"))
def _rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, starts: list[int], keys: Tensor, values: Tensor
) -> Tensor:
    tokens = q.shape[1]
    rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
    for row, start in enumerate(starts):
        slots = slice(start, start + tokens)
        rotated[row] = rotate(q[row], cos[slots], sin[slots]).to(q.dtype)
        keys[row, :, slots] = stored(rotate(k[row], cos[slots], sin[slots]), keys.dtype).transpose(0, 1)
        values[row, :, slots] = stored(v[row], values.dtype).transpose(0, 1)
    return rotated


def rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, starts: list[int], keys: Tensor, values: Tensor
) -> Tensor:
    """Rotates q ``[batch, tokens, heads, dim]`` and k ``[batch, tokens, kv_heads, dim]``; writes k and v into the
    ragged cache; -> rotated q.

    Token t of row r has position and slot ``starts[r] + t``. cos, sin float32 ``[positions, rotary_dim / 2]``: the
    first rotary_dim elements of a head are rotated, halves against each other. keys, values float32 or bfloat16
    ``[batch, kv_heads, slots, dim]``, or rows of codes ``[batch, kv_heads, slots, width]`` of a format whose dtype
    they have (formats/cache/: int8 ``dim + 4``, uint8 ``dim / 2 + 4``); dense in their last two axes.
    """
    return _rope_write(q, k, v, cos, sin, starts, keys, values)


def _check_ragged_attention(given: Operands) -> None:
    _check_starts(given)
    if given.q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"{given.op}: head_dim is {given.q.shape[-1]}, the kernel takes up to {MAX_HEAD_DIM}")
    if given.window < 0 or not given.softcap >= 0:
        raise ValueError(
            f"{given.op}: window is {given.window} and softcap {given.softcap}, both are 0 (none) or positive"
        )
    _check_draft_window(given)


def _check_draft_window(given: Operands) -> None:
    if given.draft_window < 0:
        raise ValueError(f"{given.op}: draft_window is {given.draft_window}, expected 0 (none) or a number of slots")


@operator(_check_ragged_attention, lambda given: given.q.new_empty(given.q.shape))
def _ragged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: list[int],
    scale: float,
    window: int,
    softcap: float,
    draft_window: int,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for row, start in enumerate(starts):
        lanes = (lane[row, :, : start + q.shape[1]] for lane in (keys, values))
        out[row] = attend(q[row], *lanes, start, scale, window, softcap, draft_window).to(q.dtype)
    return out


def ragged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: list[int],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    draft_window: int = 0,
) -> Tensor:
    """Causal grouped-query attention of rotated q ``[batch, tokens, heads, dim]`` over a ragged cache as in
    ``rope_write`` -> ``[batch, tokens, heads, dim]``.

    Token t of row r sits in slot ``starts[r] + t`` and sees the slots up to its own, only the last ``window`` of them
    unless that is 0. Unless it is 0, ``draft_window`` leaves of these the first FIRST_SLOTS of the row and the last
    ``draft_window`` (StreamingLLM, arXiv 2309.17453, section 3). Scores are multiplied by ``scale``, then capped to
    ``softcap * tanh(score / softcap)`` unless 0. Over bfloat16 or codes a kernel may round queries, softmax
    weights and what codes stand for to bfloat16; it sums in float32.
    """
    return _ragged_attention(q, keys, values, starts, scale, window, softcap, draft_window)


def _check_rope_write_rows(given: Operands) -> None:
    given.require_float("qkv", CACHE_FLOATS)
    batch, kv_heads, _, dim = _check_rows(given, None)
    qkv, heads, width = given.qkv, given.heads, (given.heads + 2 * kv_heads) * dim
    if heads < 1 or qkv.ndim != 3 or qkv.shape[0] != batch or qkv.shape[2] != width:
        raise ValueError(
            f"{given.op}: qkv has shape {list(qkv.shape)}, expected [{batch}, width, (heads + 2 * {kv_heads}) * {dim}]"
            f" = [{batch}, width, {width}] for {heads} heads"
        )
    for name in ("q_norm", "k_norm"):
        if vars(given)[name] is not None:
            given.require_dtype(name, torch.float32)
            given.require_shape(name, (dim,))
    if not given.eps >= 0:
        raise ValueError(f"{given.op}: eps is {given.eps}, expected 0 or a positive number")
    _check_rotary(given, dim)
    given.require_contiguous("cos")
    given.require_contiguous("sin")


@operator(_check_rope_write_rows, lambda given: given.qkv.new_empty(
    (*given.qkv.shape[:2], given.heads, _head_dim(given.keys))
), writes=("keys", "values"), composed_on_cpu=True)  # fmt: skip
def rope_write_rows(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, starts: Tensor,
    counts: Tensor, keys: Tensor, values: Tensor, heads: int,
) -> Tensor:  # fmt: skip
    """qkv float32 or bfloat16 ``[batch, width, (heads + 2 kv_heads) * dim]`` -> rotated q ``[batch, width, heads,
    dim]``; k, normed and rotated, and v stand in slots starts[r] + t of the cache.

    q_norm, k_norm float32 ``[dim]`` or None; what the norm of a head gives is rounded to qkv.dtype before it is
    rotated, as between two modules. cos, sin and the cache are those of ``rope_write``; on a GPU qkv is bfloat16.
    """
    kv_heads, dim = keys.shape[1], _head_dim(keys)
    q, k, v = qkv.unflatten(2, (-1, dim)).split([heads, kv_heads, kv_heads], dim=2)
    q, k = _normed(q, q_norm, eps), _normed(k, k_norm, eps)
    rotated = torch.zeros_like(q, memory_format=torch.contiguous_format)
    limit = min(keys.shape[2], len(cos))
    for row, start, count in _real_rows("rope_write_rows", starts, counts, qkv.shape[1], limit):
        one, tokens = slice(row, row + 1), slice(0, count)
        parts = q[one, tokens], k[one, tokens], v[one, tokens]
        rotated[one, tokens] = _rope_write(*parts, cos, sin, [start], keys[one], values[one])
    return rotated


def _check_ragged_attention_rows(given: Operands) -> None:
    given.require_float("q", CACHE_FLOATS)
    _check_rows(given, "q")
    if not math.isfinite(given.scale):
        raise ValueError(f"{given.op}: scale is {given.scale}, expected a finite number")
    if given.window < 0:
        raise ValueError(f"{given.op}: window is {given.window}, expected 0 (none) or a number of slots")
    if not 0 <= given.softcap < math.inf:
        raise ValueError(f"{given.op}: softcap is {given.softcap}, expected 0 (none) or a positive number")
    _check_draft_window(given)
    if given.sinks is not None:
        given.require_part("sinks", torch.float32, (given.q.shape[2],))


@operator(_check_ragged_attention_rows, lambda given: given.q.new_empty(given.q.shape), composed_on_cpu=True)
def _ragged_attention_rows(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, counts: Tensor, scale: float, window: int,
    softcap: float, draft_window: int, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, start, count in _real_rows("ragged_attention_rows", starts, counts, q.shape[1], keys.shape[2]):
        one, tokens = slice(row, row + 1), slice(0, count)
        lanes, rule = (keys[one], values[one]), (scale, window, softcap, draft_window)
        if sinks is None:
            out[one, tokens] = _ragged_attention(q[one, tokens], *lanes, [start], *rule)
            continue
        for t in range(count):  # one by one: products of several tokens may be summed in another order
            seen = [lane[0, :, : start + t + 1] for lane in lanes]
            out[row, t] = attend(q[row, t : t + 1], *seen, start + t, *rule, sinks)[0].to(q.dtype)
    return out


def ragged_attention_rows(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, counts: Tensor, scale: float, window: int,
    softcap: float, draft_window: int = 0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``ragged_attention`` of q float32 or bfloat16 ``[batch, width, heads, dim]`` where tokens are real, zeros for
    padding. On a GPU q is bfloat16, and a softmax weight is rounded to bfloat16 before it is multiplied.

    Over codes a GPU multiplies these, int4 ones less 8, and applies what a row says of them late, in float32: a score
    is the product times the key's step (plus the query's sum times its zero), and a weight times the value's step is
    rounded to bfloat16 (weights times zeros are summed beside). Slots are summed in the order of a bfloat16 cache.

    sinks: float32 ``[heads]``, a score of every head that is part of its softmax, without a value (gpt-oss).
    """
    return _ragged_attention_rows(q, keys, values, starts, counts, scale, window, softcap, draft_window, sinks)


def _head_dim(lanes: Tensor) -> int:
    """Of keys or values as they are, or of rows of codes."""
    codes = codes_of(lanes.dtype)
    return lanes.shape[3] if codes is None else codes.head_dim(lanes.shape[3])


def _normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return heads if weight is None else rms_norm(heads.contiguous(), weight, eps)[0]


def _real_rows(op: str, starts: Tensor, counts: Tensor, width: int, limit: int) -> Iterator[tuple[int, int, int]]:
    """(row, start, real tokens) of the rows that have any; ValueError where they reach beyond `limit`."""
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        real = min(count, width)
        if real > 0 and not 0 <= start <= limit - real:
            raise ValueError(
                f"{op}: row {row} has its {real} tokens from slot {start} on, slots and positions are 0 to {limit - 1}"
            )
        if real > 0:
            yield row, start, real
