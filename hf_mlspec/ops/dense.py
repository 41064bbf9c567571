"""How are weights multiplied that are not packed? In bfloat16 or float32, and a few rows of a bfloat16 weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import Operands, operator
from .products import bf16_product, bias_of, finish, in_slices


def _check(given: Operands, dtype: torch.dtype) -> None:
    weight = given.weight
    if weight.ndim != 2:
        raise ValueError(f"{given.op}: weight has shape {list(weight.shape)}, expected [out, in]")
    given.require_part("weight", dtype, weight.shape)
    given.require_rows(weight.shape[1], weight.shape[0])


def _check_bf16_rows(given: Operands) -> None:
    _check(given, torch.bfloat16)
    if given.out_features < len(given.weight):
        raise ValueError(
            f"{given.op}: out_features is {given.out_features}, weight has {len(given.weight)} of its rows"
        )


def _rows_of_weight(given: Operands) -> Tensor:
    return given.x.new_empty((*given.x.shape[:-1], len(given.weight)))


@operator(lambda given: _check(given, torch.bfloat16), _rows_of_weight)
def _bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return in_slices(lambda rows: bf16_product(x, weight[rows].to, bias_of(bias, rows)), *weight.shape)


def bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float x ``[..., in]``, rounded to bfloat16, times bfloat16 ``[out, in]`` -> ``[..., out]``, float32 sums."""
    return _bf16_linear(x, weight, bias)


@operator(lambda given: _check(given, torch.float32), _rows_of_weight)
def _f32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return finish(F.linear(x.float(), weight), bias, x.dtype)


def f32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float x ``[..., in]`` times float32 ``[out, in]`` -> ``[..., out]``, summed in float32."""
    return _f32_linear(x, weight, bias)


@operator(_check_bf16_rows, _rows_of_weight, composed_on_cpu=True)
def bf16_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """float x ``[..., in]`` times k outputs, bfloat16 ``[k, in]``, of a weight that has out_features of them ->
    ``[..., k]``, the bits of ``bf16_linear`` on the whole weight: on a GPU its order of sums depends on its shape."""
    return _bf16_linear(x, weight, bias)
