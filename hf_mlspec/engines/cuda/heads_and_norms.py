"""How are the rows of a step normed on a device, and how do their heads come to lie as the kernels take them?"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import ops
from ...ops.compiled_decoder import Sizes
from ..architecture import Norm, Outline
from .experts import ExpertRows


class LayerNorm(NamedTuple):
    """A norm that takes the mean off, of the dtype of what it norms."""

    weight: Tensor
    bias: Tensor | None


def normed_sum(
    total: Tensor, added: Tensor | ExpertRows | None, norm: Tensor | LayerNorm | None, eps: float,
    order: Tensor | None = None, how: ops.CodesOf | None = None,
) -> tuple[Tensor | ops.Codes, Tensor]:  # fmt: skip
    """The normed sum of both (without a norm the sum itself), its columns in an order, and the sum. how: the normed
    rows are coded so, where a kernel of the norm does it."""
    if how is not None and isinstance(norm, Tensor) and not isinstance(added, ExpertRows):
        x, residual = (total, None) if added is None else (added, total)
        return ops.norm_codes(x, norm, eps, residual, order, how)
    if isinstance(added, ExpertRows):
        if isinstance(norm, Tensor) and order is None:
            return added.normed(total, norm, eps)
        added = added.summed()
    if isinstance(norm, Tensor):
        x, residual = (total, None) if added is None else (added, total)
        if order is None:
            return ops.rms_norm(x, norm, eps, residual)
        return ops.rms_norm_in_order(x, norm, eps, residual, order)
    total = total if added is None else total + added
    normed = total if norm is None else F.layer_norm(total, total.shape[-1:], norm.weight, norm.bias, eps)
    return normed if order is None else ops.ordered_rows(normed, order), total


def norm_of(norm: Norm | None, found: Outline, device: torch.device) -> Tensor | LayerNorm | None:
    """The weight of an RMS norm, or a layer norm in the dtype of what it norms."""
    if norm is None or not found.sizes.norms_have_mean:
        return None if norm is None else norm.weight.to(device)
    bias = None if norm.bias is None else norm.bias.to(device, found.dtype)
    return LayerNorm(norm.weight.to(device, found.dtype), bias)


def normed_together(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """Queries and keys ``[n, (heads + 2 kv_heads) * head_dim]`` normed over all heads of either."""
    q, k, v = qkv.split([len(q_norm), len(k_norm), qkv.shape[1] - len(q_norm) - len(k_norm)], dim=1)
    return torch.cat([ops.rms_norm(q, q_norm, eps)[0], ops.rms_norm(k, k_norm, eps)[0], v], dim=1)


def heads_order(sizes: Sizes, device: torch.device) -> Tensor | None:
    """int32: where queries, keys and values lie among those of one key head after the other; and of pairs that are
    rotated the first elements before the second ones, of queries and keys alike, which changes none of their products;
    and of queries with a gate behind each, those without, the gates behind all values.
    None where all lie as the kernels take them."""
    group, dim, pairs = sizes.heads // sizes.kv_heads, sizes.head_dim, sizes.rotary_dim // 2
    if sizes.gated_heads:
        return _gates_last(sizes, device)
    if not sizes.grouped_qkv and not sizes.rotates_pairs:
        return None
    places = torch.arange(sizes.kv_heads * (group + 2) * dim, dtype=torch.int32, device=device)
    if sizes.grouped_qkv:
        parts = places.view(sizes.kv_heads, group + 2, dim).split([group, 1, 1], dim=1)
        places = torch.cat([part.reshape(-1) for part in parts])
    if sizes.rotates_pairs:
        turned, values = places.split([(sizes.heads + sizes.kv_heads) * dim, sizes.kv_heads * dim])
        turned = turned.view(-1, dim)
        pair, rest = turned[:, : 2 * pairs].view(-1, pairs, 2), turned[:, 2 * pairs :]
        places = torch.cat([torch.cat([pair[..., 0], pair[..., 1], rest], dim=1).reshape(-1), values])
    return places.contiguous()


def _gates_last(sizes: Sizes, device: torch.device) -> Tensor:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    places = torch.arange(2 * queries + 2 * keys, dtype=torch.int32, device=device)
    both, others = places.split([2 * queries, 2 * keys])
    both = both.view(sizes.heads, 2, sizes.head_dim)
    return torch.cat([both[:, 0].reshape(-1), others, both[:, 1].reshape(-1)]).contiguous()
