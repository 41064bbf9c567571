"""Which experts does a row go to, and in which order do kernels multiply the pairs of rows and experts?

A pair is a token and one of its experts: pair = token * chosen + rank. A plan lists the pairs by expert, for kernels
that cannot ask the host:

    int32 [pairs + 3 * items]    the pairs in order of their experts; then of each item its expert, the place of its
                                 first pair among those, and how many pairs it has, 0 where it is not used
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dense import _f32_linear
from .operator import CACHE_FLOATS, Operands, operator
from .rows import _rms_norm

MOST_ROUTED = 8192  # MLSPEC_CUDA_MOST_ROUTED


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


def _check_norm_route(given: Operands) -> None:
    given.require_float("x", CACHE_FLOATS)
    if given.x.ndim != 2 or len(given.x) != 1:
        raise ValueError(f"{given.op}: x has shape {list(given.x.shape)}, expected [1, hidden]")
    given.require_same("residual", "x")
    given.require_float("weight")
    given.require_shape("weight", given.x.shape[1:])
    _check_route(given)


def _fake_norm_route(given: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return given.x.new_empty(given.x.shape), given.x.new_empty(given.x.shape), *_fake_route(given)


@operator(_check_norm_route, _fake_norm_route, composed_on_cpu=True)
def norm_route_row(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, router: Tensor, bias: Tensor | None, num_experts: int,
    chosen: int, renormalize: int, choice_bias: Tensor | None, groups: int, chosen_groups: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``rms_norm`` of one row x and residual ``[1, hidden]``, and ``route_rows`` of what is normed, with the same bits
    -> both results, in this order. On a GPU one kernel, from sm_90 on, of up to MOST_ROUTED columns, 256 experts."""
    normed, total = _rms_norm(x, weight, eps, residual)
    how = num_experts, chosen, renormalize, choice_bias, groups, chosen_groups, scale
    return normed, total, *_route_rows(normed, router, bias, *how)


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
