"""What do the ops over single rows compute, in plain torch: norm, gate, rotary, attention over a ragged cache?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import operands_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (plus residual, rounded to x.dtype) over its root mean square, times weight; and that sum, or ``[0]``."""
    operands_rows.check_rms_norm(x, weight, residual)
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), x.new_empty(0) if residual is None else total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, rounded once."""
    operands_rows.check_silu_mul(gate, up)
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, starts: list[int], keys: Tensor, values: Tensor
) -> Tensor:
    """Rotated q; rotated k and v stand in slots starts[r] + t of row r of the cache."""
    operands_rows.check_rope_write(q, k, v, cos, sin, starts, keys, values)
    tokens = q.shape[1]
    rotated = torch.empty_like(q, memory_format=torch.contiguous_format)
    for row, start in enumerate(starts):
        slots = slice(start, start + tokens)
        rotated[row] = _rotate(q[row], cos[slots], sin[slots]).to(q.dtype)
        keys[row, :, slots] = _rotate(k[row], cos[slots], sin[slots]).transpose(0, 1).to(keys.dtype)
        values[row, :, slots] = v[row].transpose(0, 1).to(values.dtype)
    return rotated


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads ``[tokens, heads, dim]``, cos and sin ``[tokens, rotary_dim / 2]``: halves against each other."""
    half = cos.shape[1]
    first, second, rest = heads.float().split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def ragged_attention(
    q: Tensor, keys: Tensor, values: Tensor, starts: list[int], scale: float, window: int, softcap: float
) -> Tensor:
    """Causal grouped-query attention of the tokens in slots starts[r] + t over their row's slots: ``[batch, tokens,
    heads, dim]`` in q.dtype."""
    operands_rows.check_ragged_attention(q, keys, values, starts, window, softcap)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for row, start in enumerate(starts):
        end = start + q.shape[1]
        out[row] = _attend(q[row], keys[row, :, :end], values[row, :, :end], start, scale, window, softcap).to(q.dtype)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int, softcap: float) -> Tensor:
    groups = q.shape[1] // keys.shape[0]
    query = q.float().transpose(0, 1)  # [heads, tokens, dim]
    scores = query @ keys.float().repeat_interleave(groups, 0).transpose(1, 2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    position = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
    slot = torch.arange(keys.shape[1], device=q.device)
    hidden = slot > position
    if window:
        hidden |= slot <= position - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values.float().repeat_interleave(groups, 0)).transpose(0, 1)
