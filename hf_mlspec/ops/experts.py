"""How do rows go through experts, multiplied expert by expert, and how are they added up in an order that is fixed?

Pairs of tokens and experts, and their plan: as of expert_plans.py. Whoever else visits an expert, and however many, a
pair's bits are its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..formats.nested.codebooks import LEVELS
from ..formats.planes import GROUP_SIZES
from .dense import _bf16_linear, _f32_linear
from .expert_plans import most_items
from .int4 import int4_linear
from .mxfp4 import mxfp4_linear
from .nested import nested_linear, require_nested_bits
from .operator import CACHE_FLOATS, Operands, operator
from .planes import bitplane_linear, require_planes, stored_planes
from .rows import ACTIVATIONS, _rms_norm, gated, gated_pairs

NOT_GATED = -1  # in place of an activation
GATED_OUTPUTS = 64  # gate before up are a multiple of so many outputs where kernels of GPUs gate them


def _check_rows(given: Operands, count: int, in_features: int, out_features: int) -> None:
    given.require_float("x", CACHE_FLOATS)
    given.require_dtype("experts", torch.int32)
    x, experts = given.x, given.experts
    if experts.ndim != 2:
        raise ValueError(f"{given.op}: experts has shape {list(experts.shape)}, expected [n, chosen]")
    given.require_contiguous("experts")
    if x.ndim != 2 or x.shape[1] != in_features or len(x) not in (len(experts), experts.numel()):
        raise ValueError(
            f"{given.op}: x has shape {list(x.shape)}, expected [{len(experts)} or {experts.numel()}, {in_features}]"
        )
    if not 0 <= given.limit < float("inf") or (given.limit and out_features % 2):
        raise ValueError(
            f"{given.op}: limit is {given.limit} for {out_features} outputs, expected 0 (none), or a number above for "
            "gate and up in turns"
        )
    if given.activation != NOT_GATED:
        if given.activation not in ACTIVATIONS.values():
            raise ValueError(
                f"{given.op}: activation is {given.activation}, choose {NOT_GATED} or one of {ACTIVATIONS}"
            )
        if given.limit or out_features % 2:
            raise ValueError(
                f"{given.op}: activation is {given.activation} for {out_features} outputs with limit {given.limit}: "
                "gate before up are even in number and have no limit"
            )
    given.require_numbers("plan", experts.numel() + 3 * most_items(experts.numel(), count))
    if given.bias is not None:
        given.require_float("bias", CACHE_FLOATS)
        given.require_shape("bias", (count, out_features))
        given.require_contiguous("bias")


def _check_dense(given: Operands) -> None:
    if given.weight.ndim != 3 or not len(given.weight):
        raise ValueError(f"{given.op}: weight has shape {list(given.weight.shape)}, expected [experts, out, in]")
    given.require_float("weight", CACHE_FLOATS)
    given.require_contiguous("weight")
    _check_rows(given, len(given.weight), given.weight.shape[2], given.weight.shape[1])


def _check_stacked(given: Operands) -> None:
    """Of experts in tiles: each one's are looked at where they are multiplied."""
    tiles, scales = given.weight_tiles, given.scale_tiles
    if tiles.ndim != 4 or scales.ndim != 4 or not len(tiles):
        raise ValueError(
            f"{given.op}: weight_tiles has shape {list(tiles.shape)} and scale_tiles {list(scales.shape)}, expected 4 "
            "axes from prepack, experts first"
        )
    _check_rows(given, len(tiles), given.x.shape[-1], given.out_features)


def _pairs(given: Operands, out_features: int) -> Tensor:
    gated = given.limit or given.activation != NOT_GATED
    return given.x.new_empty((given.experts.numel(), out_features // 2 if gated else out_features))


def _by_expert(
    x: Tensor, bias: Tensor | None, experts: Tensor, count: int, out: int,
    multiply: Callable[[Tensor, int, Tensor | None], Tensor],
) -> Tensor:  # fmt: skip
    pairs = experts.flatten()
    y = x.new_empty(len(pairs), out)
    for expert in pairs.unique().tolist():
        if not 0 <= expert < count:
            continue
        own = (pairs == expert).nonzero().flatten()
        y[own] = multiply(x[own // (len(pairs) // len(x))], expert, None if bias is None else bias[expert])
    return y


def _gated(y: Tensor, slope: float, limit: float, activation: int) -> Tensor:
    if activation != NOT_GATED:
        return gated(y, activation)
    return gated_pairs(y, slope, limit) if limit else y


@operator(_check_dense, lambda given: _pairs(given, given.weight.shape[1]), composed_on_cpu=True)
def _dense_expert_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor, slope: float, limit: float,
    activation: int,
) -> Tensor:  # fmt: skip
    multiply = _bf16_linear if weight.dtype == torch.bfloat16 else _f32_linear
    y = _by_expert(x, bias, experts, *weight.shape[:2], lambda rows, expert, own: multiply(rows, weight[expert], own))
    return _gated(y, slope, limit, activation)


def dense_expert_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor,
    slope: float = 0.0, limit: float = 0.0, activation: int = NOT_GATED,
) -> Tensor:  # fmt: skip
    """x ``[n, in]``, a row for all of a token's experts, or ``[n * chosen, in]``, one for each, times those of weight
    ``[experts, out, in]``, bfloat16 or float32, that experts and plan of ``route_rows`` say -> ``[n * chosen, out]``.
    bias ``[experts, out]``, bfloat16 or float32, is added before a sum is rounded. Experts without rows are not read.
    On a GPU x and weight are bfloat16; sums are float32. limit above 0: outputs are gate and up in turns, and the
    result ``[n * chosen, out / 2]`` is that of ``gated_pairs``; activation, a number of ACTIVATIONS: gate comes before
    up, and the result is that of ``gated``, with the same bits; on a GPU out is then a multiple of GATED_OUTPUTS."""
    return _dense_expert_rows(x, weight, bias, experts, plan, slope, limit, activation)


@operator(_check_stacked, lambda given: _pairs(given, given.out_features), composed_on_cpu=True)
def _mxfp4_expert_rows(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor,
    out_features: int, activation_bits: int, slope: float, limit: float, activation: int,
) -> Tensor:  # fmt: skip
    def multiply(rows: Tensor, expert: int, own: Tensor | None) -> Tensor:
        tiles = weight_tiles[expert], scale_tiles[expert]
        return mxfp4_linear(rows, *tiles, out_features, own, activation_bits)

    return _gated(_by_expert(x, bias, experts, len(weight_tiles), out_features, multiply), slope, limit, activation)


def mxfp4_expert_rows(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor,
    out_features: int, activation_bits: int, slope: float = 0.0, limit: float = 0.0, activation: int = NOT_GATED,
) -> Tensor:  # fmt: skip
    """As ``dense_expert_rows``, times MXFP4 weights, those of ``prepack_mxfp4`` of every expert stacked, as
    ``mxfp4_linear`` multiplies each."""
    how = out_features, activation_bits, slope, limit, activation
    return _mxfp4_expert_rows(x, weight_tiles, scale_tiles, bias, experts, plan, *how)


@operator(_check_stacked, lambda given: _pairs(given, given.out_features), composed_on_cpu=True)
def _int4_expert_rows(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, bias: Tensor | None,
    experts: Tensor, plan: Tensor, out_features: int, group_size: int, activation_bits: int, activation_clip: float,
    slope: float, limit: float, activation: int,
) -> Tensor:  # fmt: skip
    how = {"group_size": group_size, "activation_bits": activation_bits, "activation_clip": activation_clip}

    def multiply(rows: Tensor, expert: int, own: Tensor | None) -> Tensor:
        tiles = weight_tiles[expert], scale_tiles[expert], None if zero_tiles is None else zero_tiles[expert]
        return int4_linear(rows, *tiles, out_features, own, **how)

    return _gated(_by_expert(x, bias, experts, len(weight_tiles), out_features, multiply), slope, limit, activation)


def int4_expert_rows(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, bias: Tensor | None,
    experts: Tensor, plan: Tensor, out_features: int, group_size: int, activation_bits: int, activation_clip: float,
    slope: float = 0.0, limit: float = 0.0, activation: int = NOT_GATED,
) -> Tensor:  # fmt: skip
    """As ``dense_expert_rows``, times int4 weights, those of ``prepack_int4`` of every expert stacked, as
    ``int4_linear`` multiplies each."""
    how = out_features, group_size, activation_bits, activation_clip, slope, limit, activation
    return _int4_expert_rows(x, weight_tiles, scale_tiles, zero_tiles, bias, experts, plan, *how)


def _check_nested(given: Operands) -> None:
    """Of nested experts in tiles, as `_check_stacked`."""
    parts = [given.draft_tiles, given.exponent_tiles, given.low_tiles]
    if any(part.ndim != 4 for part in parts) or len({len(part) for part in parts}) > 1 or not len(parts[0]):
        raise ValueError(
            f"{given.op}: draft, exponent and low tiles have shapes {[list(part.shape) for part in parts]}, expected "
            "4 axes from prepack_nested, as many experts first"
        )
    given.require_part("codebook", torch.uint8, [len(parts[0]), LEVELS])
    require_nested_bits(given)
    _check_rows(given, len(parts[0]), given.x.shape[-1], given.out_features)


@operator(_check_nested, lambda given: _pairs(given, given.out_features), composed_on_cpu=True)
def _nested_expert_rows(
    x: Tensor, draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, codebook: Tensor, bias: Tensor | None,
    experts: Tensor, plan: Tensor, out_features: int, weight_bits: int, activation_bits: int, slope: float,
    limit: float, activation: int,
) -> Tensor:  # fmt: skip
    """Knows no escapes."""
    how = {"weight_bits": weight_bits, "activation_bits": activation_bits}

    def multiply(rows: Tensor, expert: int, own: Tensor | None) -> Tensor:
        tiles = draft_tiles[expert], exponent_tiles[expert], low_tiles[expert], codebook[expert]
        return nested_linear(rows, *tiles, out_features, own, **how)

    return _gated(_by_expert(x, bias, experts, len(draft_tiles), out_features, multiply), slope, limit, activation)


def nested_expert_rows(
    x: Tensor, draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, codebook: Tensor, bias: Tensor | None,
    experts: Tensor, plan: Tensor, out_features: int, weight_bits: int, activation_bits: int, slope: float = 0.0,
    limit: float = 0.0, activation: int = NOT_GATED, *, escape_rows: Tensor | None = None,
    escape_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As ``dense_expert_rows``, times nested weights, those of ``prepack_nested`` of every expert stacked, codebook
    uint8 ``[experts, 8]``: at 16 and 16 bits exactly, with the bits of ``dense_expert_rows`` on the weight that was
    nested, at 4 and 16 or 8 the draft. Outputs that have escapes are among escape_rows int64 ``[experts, k]``, whole
    rows escape_weight bfloat16 ``[experts, k, in]``: the exact product takes them from there."""
    how = out_features, weight_bits, activation_bits
    tiles = draft_tiles, exponent_tiles, low_tiles, codebook
    if escape_rows is None or escape_weight is None or weight_bits != 16:
        return _nested_expert_rows(x, *tiles, bias, experts, plan, *how, slope, limit, activation)
    y = _nested_expert_rows(x, *tiles, bias, experts, plan, *how, 0.0, 0.0, NOT_GATED)
    own = None if bias is None else bias.gather(1, escape_rows)
    exact = dense_expert_rows(x, escape_weight, own, experts, plan)
    rows = escape_rows[experts.flatten().long().clamp(max=len(escape_rows) - 1)]
    return _gated(y.scatter_(1, rows, exact), slope, limit, activation)


def _check_planes(given: Operands) -> None:
    """Of experts in bit-planes: each one's tiles are looked at where they are multiplied."""
    planes, scales = given.plane_tiles, given.scale_tiles
    if planes.ndim not in (4, 5) or scales.ndim != 4 or not len(planes) or len(planes) != len(scales):
        raise ValueError(
            f"{given.op}: plane_tiles has shape {list(planes.shape)} and scale_tiles {list(scales.shape)}, expected "
            "those of prepack_planes, as many experts first"
        )
    given.require_choice("group_size", GROUP_SIZES)
    require_planes(given, stored_planes(planes[0]))
    _check_rows(given, len(planes), given.x.shape[-1], given.out_features)


@operator(_check_planes, lambda given: _pairs(given, given.out_features), composed_on_cpu=True)
def _plane_expert_rows(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor,
    out_features: int, group_size: int, zero_doubled: int, num_planes: int, slope: float, limit: float,
    activation: int,
) -> Tensor:  # fmt: skip
    how = {"group_size": group_size, "zero_doubled": zero_doubled, "num_planes": num_planes}

    def multiply(rows: Tensor, expert: int, own: Tensor | None) -> Tensor:
        return bitplane_linear(rows, plane_tiles[expert], scale_tiles[expert], out_features, own, **how)

    return _gated(_by_expert(x, bias, experts, len(plane_tiles), out_features, multiply), slope, limit, activation)


def plane_expert_rows(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor,
    out_features: int, group_size: int, zero_doubled: int, num_planes: int, slope: float = 0.0, limit: float = 0.0,
    activation: int = NOT_GATED,
) -> Tensor:  # fmt: skip
    """As ``dense_expert_rows``, times the first num_planes bit-planes, those of ``prepack_planes`` of every expert
    stacked, as ``bitplane_linear`` multiplies each: zero_doubled and group_size are those of all."""
    how = out_features, group_size, zero_doubled, num_planes, slope, limit, activation
    return _plane_expert_rows(x, plane_tiles, scale_tiles, bias, experts, plan, *how)


def _rows_of_token(rows: Tensor, weights: Tensor, shared: Tensor | None) -> int:
    """A shared row has the last weight, or, where there are only those of rows, none."""
    most = weights.shape[1]
    return most - (shared is not None and not (len(weights) and len(rows) == len(weights) * most))


def _check_weighted(given: Operands) -> None:
    given.require_float("rows", CACHE_FLOATS)
    rows, weights = given.rows, given.weights
    if rows.ndim != 2 or weights.ndim != 2:
        raise ValueError(
            f"{given.op}: rows has shape {list(rows.shape)} and weights {list(weights.shape)}, expected [n * chosen, "
            "width] and [n, chosen]"
        )
    given.require_part("weights", torch.float32, weights.shape)
    given.require_shape("rows", (len(weights) * _rows_of_token(rows, weights, given.shared), rows.shape[1]))
    given.require_contiguous("rows")
    if given.shared is not None:
        given.require_part("shared", rows.dtype, (len(weights), rows.shape[1]))


@operator(_check_weighted, lambda given: given.rows.new_empty((len(given.weights), given.rows.shape[1])),
          composed_on_cpu=True)  # fmt: skip
def weighted_rows(rows: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    """rows ``[n * chosen, width]``, float32 or bfloat16, times weights float32 ``[n, chosen]``, added in float32 in
    their order -> ``[n, width]`` in the dtype of rows. shared ``[n, width]``: added last, times one weight more where
    there is one, else as it is. On a GPU rows are bfloat16."""
    chosen = _rows_of_token(rows, weights, shared)
    own = rows.view(len(weights), chosen, -1)
    total = own.new_zeros(len(weights), own.shape[2], dtype=torch.float32)
    for rank in range(chosen):  # a sum over an axis may order its terms by the shape
        total = total + own[:, rank].float() * weights[:, rank, None]
    if shared is not None:
        total = total + (shared.float() * weights[:, chosen, None] if weights.shape[1] > chosen else shared.float())
    return total.to(rows.dtype)


def _check_weighted_norm(given: Operands) -> None:
    _check_weighted(given)
    given.require_part("residual", given.rows.dtype, (len(given.weights), given.rows.shape[1]))
    given.require_float("weight")
    given.require_shape("weight", given.rows.shape[1:])


@operator(_check_weighted_norm, lambda given: (
    given.residual.new_empty(given.residual.shape), given.residual.new_empty(given.residual.shape)
), composed_on_cpu=True)  # fmt: skip
def weighted_norm_rows(
    rows: Tensor, weights: Tensor, shared: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of ``weighted_rows``, with the same bits -> what is normed, and the sum with residual. On a GPU one
    kernel, and rows have up to 16,384 columns."""
    return _rms_norm(weighted_rows(rows, weights, shared), weight, eps, residual)
