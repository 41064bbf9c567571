"""Which int4 scale serves a group best where errors do not count alike?

Proposals are those of formats/int4.py, carried on until half of the range is clipped. An error d of a group costs
``sum w d^2``, w being a weight per input, or ``d^T G d``, G being the group's block of the Hessian.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.int4 import SYMMETRIC_ZERO
from ..formats.packing import LARGEST_CODE

_SYMMETRIC_DIVISORS = tuple(7 + step / 2 for step in range(15))  # amax / 7 ... amax / 14: half is clipped
_ASYMMETRIC_DIVISORS = tuple(15.0 + step for step in range(16))
_LARGEST, _SMALLEST = torch.finfo(torch.float16).max, 2.0**-24


def search(groups: Tensor, costs: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """groups float32 ``[out, n, group]``, costs float32 ``[n, group]`` or ``[n, group, group]`` -> scales (float32
    that float16 holds) and zero points, float32 ``[out, n]``. The first of equally good proposals wins.

    ValueError for NaN, Inf, or a group whose scale float16 cannot hold.
    """
    low, high = groups.amin(-1), groups.amax(-1)
    span = torch.maximum(-low, high) if symmetric else high.clamp(min=0) - low.clamp(max=0)
    divisors = _SYMMETRIC_DIVISORS if symmetric else _ASYMMETRIC_DIVISORS
    _require_scale(span.max() / divisors[0])
    best = torch.full_like(span, torch.inf)
    best_scale, best_zero = torch.ones_like(span), torch.full_like(span, SYMMETRIC_ZERO if symmetric else 0)
    for divisor in divisors:
        scale = (span / divisor).clamp_(min=_SMALLEST).to(torch.float16).float()
        zero = best_zero if symmetric else _zero_point(low, scale, divisor)
        error = decode(encode(groups, scale, zero), scale, zero).sub_(groups)
        cost = _cost(error, costs)
        better = (cost < best) & (span > 0)
        best = torch.where(better, cost, best)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale, best_zero


def clipped_scales(groups: Tensor, clip: float) -> Tensor:
    """Symmetric scales ``clip amax / 7`` of float32 ``[out, n, group]``, float32 that float16 holds; 1 for zeros.
    ValueError as `search`."""
    span = groups.abs().amax(-1)
    _require_scale(clip * span.max() / _SYMMETRIC_DIVISORS[0])
    scale = (clip * span / _SYMMETRIC_DIVISORS[0]).clamp_(min=_SMALLEST).to(torch.float16).float()
    return torch.where(span > 0, scale, 1.0)


def _require_scale(widest: Tensor) -> None:
    if not widest <= _LARGEST:  # NaN does not
        raise ValueError(f"a group needs the scale {widest:g}, float16 ends at {_LARGEST:g}: keep it in 16 bits")


def encode(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Codes 0 ... 15 of ``[..., group]`` as float32; ties to even."""
    return (groups / scale.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, LARGEST_CODE)


def decode(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The values of codes ``[..., group]``, float32."""
    return (codes - zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1))


def _zero_point(low: Tensor, scale: Tensor, divisor: float) -> Tensor:
    clipped = (divisor - LARGEST_CODE) / 2  # steps beyond either end
    return (low.clamp(max=0).neg_() / scale - clipped).round_().clamp_(0, LARGEST_CODE)


def _cost(error: Tensor, costs: Tensor) -> Tensor:
    """``[out, n]`` of errors ``[out, n, group]``."""
    if costs.ndim == 2:
        return error.square_().mul_(costs).sum(-1)
    return torch.einsum("ngh,onh->ong", costs, error).mul_(error).sum(-1)
