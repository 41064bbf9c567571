"""What do low-rank adapters add to a linear (LoRA, arXiv 2106.09685)? Products of its inputs, and of those."""

from __future__ import annotations

import torch
from torch import Tensor

from .dense import _bf16_linear, _check
from .operator import CACHE_FLOATS, Operands, operator


def _require_matrix(given: Operands, name: str, expected: str) -> None:
    shape = list(vars(given)[name].shape)
    if len(shape) != 2 or not shape[1 if name == "between" else 0]:
        raise ValueError(f"{given.op}: {name} has shape {shape}, expected {expected}")


def _check_between(given: Operands) -> None:
    given.require_float("x", CACHE_FLOATS)
    _require_matrix(given, "down", "[ranks, in]")
    given.require_shape("x", (len(given.x), given.down.shape[1]))
    given.require_part("down", torch.float32, given.down.shape)


@operator(_check_between, lambda given: given.down.new_empty((len(given.x), len(given.down))), composed_on_cpu=True)
def low_rank_between(x: Tensor, down: Tensor) -> Tensor:
    """x float32 or bfloat16 ``[n, in]``, down float32 ``[ranks, in]`` -> ``x @ down.T`` float32 ``[n, ranks]``. On a
    GPU x is bfloat16. Here summed in float64."""
    return (x.double() @ down.double().T).float()


def _check_pairs(given: Operands, n: int, outputs: int) -> None:
    _require_matrix(given, "between", "[n, ranks]")
    _require_matrix(given, "up", "[rank, out]")
    given.require_part("between", torch.float32, (n, given.between.shape[1]))
    given.require_part("up", torch.float32, (len(given.up), outputs))
    given.require_numbers("first", outputs)


def _check_added(given: Operands) -> None:
    given.require_float("y", CACHE_FLOATS)
    if given.y.ndim != 2:
        raise ValueError(f"{given.op}: y has shape {list(given.y.shape)}, expected [n, out]")
    _check_pairs(given, *given.y.shape)


def _added(y: Tensor, between: Tensor, up: Tensor, first: Tensor) -> Tensor:
    total = y.double()
    for j in range(len(up)):
        total = total + up[j].double() * between[:, (first.long() + j).clamp(0, between.shape[1] - 1)].double()
    return total.float().to(y.dtype)


@operator(_check_added, lambda given: given.y.new_empty(given.y.shape), composed_on_cpu=True)
def low_rank_added(y: Tensor, between: Tensor, up: Tensor, first: Tensor) -> Tensor:
    """y ``[n, out]`` plus what low-rank pairs add, rounded once: column o gets the sum over j of ``up[j, o]`` times
    ``between[:, first[o] + j]``, of `low_rank_between`. y float32 or bfloat16, on a GPU bfloat16. up float32
    ``[rank, out]``, first int32 ``[out]``; a rank outside of between counts as the nearest one inside. Here in
    float64."""
    return _added(y, between, up, first)


def _check_adapted(given: Operands) -> None:
    given.require_dtype("x", torch.bfloat16)
    if given.x.ndim != 2:
        raise ValueError(f"{given.op}: x has shape {list(given.x.shape)}, expected [n, in]")
    _check(given, torch.bfloat16)
    _check_pairs(given, len(given.x), len(given.weight))


@operator(_check_adapted, lambda given: given.x.new_empty((len(given.x), len(given.weight))), composed_on_cpu=True)
def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, between: Tensor, up: Tensor, first: Tensor
) -> Tensor:
    """``low_rank_added(bf16_linear(x, weight, bias), between, up, first)`` of bfloat16 x ``[n, in]``, bit for bit; of
    few tokens on a GPU in one kernel."""
    return _added(_bf16_linear(x, weight, bias), between, up, first)
