"""How do rows go through experts? Routed, multiplied expert by expert, and added up in an order that is fixed.

A pair is a token and one of its experts: pair = token * chosen + rank. Whoever else visits an expert, and however
many, a pair's bits are its own. A plan lists the pairs by expert, for kernels that cannot ask the host:

    int32 [pairs + 3 * items]    the pairs in order of their experts; then of each item its expert, the place of its
                                 first pair among those, and how many pairs it has, 0 where it is not used
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .dense import _bf16_linear, _f32_linear
from .int4 import int4_linear
from .mxfp4 import mxfp4_linear
from .operator import CACHE_FLOATS, Operands, operator
from .rows import _rms_norm, gated_pairs


def rows_of_item(pairs: int, experts: int) -> int:
    """How many pairs a block of a kernel takes at once: mlspec_cuda_rows_of_item."""
    return 8 if pairs <= 4 * experts else 16 if pairs <= 12 * experts else 64


def most_items(pairs: int, experts: int) -> int:
    """As many items as so many pairs can need, however they are spread."""
    return min(pairs, min(pairs, experts) + pairs // rows_of_item(pairs, experts))


def plan_of(experts: Tensor, num_experts: int) -> Tensor:
    """The plan (above) of int32 experts ``[n, chosen]``; an expert's pairs stand in their order, and last those whose
    number no expert has."""
    pairs, rows = experts.numel(), rows_of_item(experts.numel(), num_experts)
    counts = torch.bincount(_sent(experts, num_experts), minlength=num_experts + 1)[:num_experts].tolist()
    items, first = [], 0
    for expert, count in enumerate(counts):
        items += [(expert, first + at, min(rows, count - at)) for at in range(0, count, rows)]
        first += count
    items += [(0, 0, 0)] * (most_items(pairs, num_experts) - len(items))
    places = _sent(experts, num_experts).sort(stable=True).indices.int()
    return torch.cat([places, torch.tensor(items, dtype=torch.int32, device=experts.device).flatten()])


def _sent(experts: Tensor, count: int) -> Tensor:
    """int64 ``[pairs]``: the expert of each pair, count for numbers that none has."""
    pairs = experts.flatten().long()
    return pairs.where((pairs >= 0) & (pairs < count), count)


def _check_route(given: Operands) -> None:
    given.require_float("x", CACHE_FLOATS)
    given.require_float("router", CACHE_FLOATS)
    x, router, count = given.x, given.router, given.num_experts
    if x.ndim != 2 or router.ndim != 2 or x.shape[1] != router.shape[1]:
        raise ValueError(
            f"{given.op}: x has shape {list(x.shape)} and router {list(router.shape)}, expected [n, hidden] and "
            "[experts, hidden]"
        )
    if count < 1 or len(router) - count not in (0, 1):
        raise ValueError(
            f"{given.op}: router has {len(router)} rows for num_experts = {count}, expected as many or one more"
        )
    if given.bias is not None:
        given.require_part("bias", torch.float32, (len(router),))
    if not 1 <= given.chosen <= count:
        raise ValueError(f"{given.op}: chosen is {given.chosen}, expected 1 to {count}")
    groups, seen = given.groups, given.chosen_groups
    if given.choice_bias is None:
        if (groups, seen, given.scale) != (1, 1, 1.0):
            raise ValueError(f"{given.op}: groups and a scale belong to sigmoids, which come with a choice_bias")
        return
    given.require_part("choice_bias", torch.float32, (count,))
    size = count // groups if groups > 0 and count % groups == 0 else 0
    if not size or not 1 <= seen <= groups or given.chosen > seen * size or (seen < groups and size < 2):
        raise ValueError(
            f"{given.op}: {given.chosen} of {count} experts are chosen in {seen} of {groups} groups: groups are "
            "equally large, of two or more, and those looked at hold as many as are chosen"
        )


def _fake_route(given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    tokens, chosen, count = len(given.x), given.chosen, given.num_experts
    pairs, shared = tokens * chosen, len(given.router) - count
    integers = given.x.new_empty((tokens, chosen), dtype=torch.int32)
    weights = given.x.new_empty((tokens, chosen + shared), dtype=torch.float32)
    return integers, weights, integers.new_empty(pairs + 3 * most_items(pairs, count))


@operator(_check_route, _fake_route, composed_on_cpu=True)
def _route_rows(
    x: Tensor, router: Tensor, bias: Tensor | None, num_experts: int, chosen: int, renormalize: int,
    choice_bias: Tensor | None, groups: int, chosen_groups: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits = _f32_linear(x.float(), router.float().contiguous(), bias)
    routing = logits[:, :num_experts]
    wide = routing.double()  # elements of a float32 function may round by their place in the tensor
    if choice_bias is None:
        experts = _largest(routing, chosen)
        shares = (wide - wide.gather(1, experts[:, :1])).exp()
        total = (shares.gather(1, experts) if renormalize else shares).sum(dim=1, keepdim=True)
    else:
        shares = wide.sigmoid()
        experts = _largest(_in_best_groups(shares.float() + choice_bias, groups, chosen_groups), chosen)
        total = shares.gather(1, experts).sum(dim=1, keepdim=True) + 1e-20 if renormalize else 1.0
    weights = shares.gather(1, experts) / total * scale
    if len(router) > num_experts:
        weights = torch.cat([weights, logits[:, num_experts:].double().sigmoid()], dim=1)
    weights = torch.where(routing.isnan().any(dim=1, keepdim=True), torch.nan, weights).float()
    return experts.int().contiguous(), weights, plan_of(experts, num_experts)


def route_rows(
    x: Tensor, router: Tensor, bias: Tensor | None, num_experts: int, chosen: int, renormalize: int,
    choice_bias: Tensor | None = None, groups: int = 1, chosen_groups: int = 1, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x ``[n, hidden]``, router ``[num_experts, hidden]`` or one row more, both float32 or bfloat16, bias float32, one
    a row of the router -> experts int32 ``[n, chosen]``, weights float32 ``[n, chosen]`` or one more, the plan.

    Logits are float32 sums. A token goes to the experts of the largest, of equal ones to the lower number; NaN is less
    than all. Weights: softmax over all experts, divided by their sum if renormalize; last the sigmoid of the last
    row's logit, where there is one more. A NaN among a token's logits makes its weights NaN. On a GPU x is bfloat16.

    With choice_bias, float32 ``[num_experts]``, sigmoids of the logits in place of softmax (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2): the largest sums of it and of choice_bias are chosen, in the chosen_groups of the
    groups whose two largest have the largest sums. Weights: the sigmoids, divided by their sum if renormalize, times
    scale.
    """
    how = num_experts, chosen, renormalize, choice_bias, groups, chosen_groups, scale
    return _route_rows(x, router, bias, *how)


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the `count` largest of each row are, of equal ones the first; NaN is less than all."""
    order = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = order.sort(dim=1, descending=True, stable=True).indices
    last = values.isnan().gather(1, order).int().sort(dim=1, stable=True).indices
    return order.gather(1, last)[:, :count]


def _in_best_groups(values: Tensor, groups: int, chosen: int) -> Tensor:
    """-Inf in place of values that are not in the chosen groups, by the sum of the two largest in each."""
    if chosen == groups:
        return values
    own = values.view(len(values) * groups, -1)
    best = own.gather(1, _largest(own, 2)).sum(dim=1).view(-1, groups)
    seen = torch.zeros_like(best, dtype=torch.bool).scatter(1, _largest(best, chosen), True)
    return values.where(seen.repeat_interleave(own.shape[1], dim=1), -torch.inf)


def _check_plan(given: Operands) -> None:
    given.require_dtype("experts", torch.int32)
    if given.experts.ndim != 2 or given.num_experts < 1:
        raise ValueError(
            f"{given.op}: experts has shape {list(given.experts.shape)} and num_experts is {given.num_experts}, "
            "expected [n, chosen] and 1 or more"
        )


def _fake_plan(given: Operands) -> Tensor:
    pairs = given.experts.numel()
    return given.experts.new_empty(pairs + 3 * most_items(pairs, given.num_experts))


@operator(_check_plan, _fake_plan, composed_on_cpu=True)
def plan_rows(experts: Tensor, num_experts: int) -> Tensor:
    """The plan of int32 experts ``[n, chosen]`` that something else than ``route_rows`` chose. Pairs whose number no
    expert has are in no item: products leave their rows unwritten."""
    return plan_of(experts, num_experts)


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
    return given.x.new_empty((given.experts.numel(), out_features // 2 if given.limit else out_features))


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


def _gated(y: Tensor, slope: float, limit: float) -> Tensor:
    return gated_pairs(y, slope, limit) if limit else y


@operator(_check_dense, lambda given: _pairs(given, given.weight.shape[1]), composed_on_cpu=True)
def _dense_expert_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor, slope: float, limit: float
) -> Tensor:
    multiply = _bf16_linear if weight.dtype == torch.bfloat16 else _f32_linear
    y = _by_expert(x, bias, experts, *weight.shape[:2], lambda rows, expert, own: multiply(rows, weight[expert], own))
    return _gated(y, slope, limit)


def dense_expert_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor,
    slope: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """x ``[n, in]``, a row for all of a token's experts, or ``[n * chosen, in]``, one for each, times those of weight
    ``[experts, out, in]``, bfloat16 or float32, that experts and plan of ``route_rows`` say -> ``[n * chosen, out]``.
    bias ``[experts, out]``, bfloat16 or float32, is added before a sum is rounded. Experts without rows are not read.
    On a GPU x and weight are bfloat16; sums are float32. limit above 0: outputs are gate and up in turns, and the
    result ``[n * chosen, out / 2]`` is that of ``gated_pairs``."""
    return _dense_expert_rows(x, weight, bias, experts, plan, slope, limit)


@operator(_check_stacked, lambda given: _pairs(given, given.out_features), composed_on_cpu=True)
def _mxfp4_expert_rows(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor,
    out_features: int, activation_bits: int, slope: float, limit: float,
) -> Tensor:  # fmt: skip
    def multiply(rows: Tensor, expert: int, own: Tensor | None) -> Tensor:
        tiles = weight_tiles[expert], scale_tiles[expert]
        return mxfp4_linear(rows, *tiles, out_features, own, activation_bits)

    return _gated(_by_expert(x, bias, experts, len(weight_tiles), out_features, multiply), slope, limit)


def mxfp4_expert_rows(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, bias: Tensor | None, experts: Tensor, plan: Tensor,
    out_features: int, activation_bits: int, slope: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """As ``dense_expert_rows``, times MXFP4 weights, those of ``prepack_mxfp4`` of every expert stacked, as
    ``mxfp4_linear`` multiplies each."""
    how = out_features, activation_bits, slope, limit
    return _mxfp4_expert_rows(x, weight_tiles, scale_tiles, bias, experts, plan, *how)


@operator(_check_stacked, lambda given: _pairs(given, given.out_features), composed_on_cpu=True)
def _int4_expert_rows(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, bias: Tensor | None,
    experts: Tensor, plan: Tensor, out_features: int, group_size: int, activation_bits: int, activation_clip: float,
    slope: float, limit: float,
) -> Tensor:  # fmt: skip
    how = {"group_size": group_size, "activation_bits": activation_bits, "activation_clip": activation_clip}

    def multiply(rows: Tensor, expert: int, own: Tensor | None) -> Tensor:
        tiles = weight_tiles[expert], scale_tiles[expert], None if zero_tiles is None else zero_tiles[expert]
        return int4_linear(rows, *tiles, out_features, own, **how)

    return _gated(_by_expert(x, bias, experts, len(weight_tiles), out_features, multiply), slope, limit)


def int4_expert_rows(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, bias: Tensor | None,
    experts: Tensor, plan: Tensor, out_features: int, group_size: int, activation_bits: int, activation_clip: float,
    slope: float = 0.0, limit: float = 0.0,
) -> Tensor:  # fmt: skip
    """As ``dense_expert_rows``, times int4 weights, those of ``prepack_int4`` of every expert stacked, as
    ``int4_linear`` multiplies each."""
    how = out_features, group_size, activation_bits, activation_clip, slope, limit
    return _int4_expert_rows(x, weight_tiles, scale_tiles, zero_tiles, bias, experts, plan, *how)


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
