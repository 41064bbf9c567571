"""How are rows multiplied by a Hadamard matrix, with the same bits on every device and instruction set?"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..formats.hadamard import Hadamard, butterflies, hadamard_matrix, is_power_of_two
from .operator import Operands, operator

MAX_ORDER = 256  # of a matrix; mlspec_hadamard in kernels_ext/cpu/kernels.h


def _check_hadamard_rows(given: Operands) -> None:
    given.require_float("x")
    given.require_axis("x")
    order = 1
    if given.matrix is not None:
        order = given.matrix.shape[0] if given.matrix.ndim else 0
        given.require_part("matrix", torch.float32, (order, order))
        if not order or order % 4 or order > MAX_ORDER:
            raise ValueError(f"{given.op}: matrix has {order} rows, expected a multiple of 4 up to {MAX_ORDER}")
    size, inner, width = given.size, given.inner, given.x.shape[-1]
    if size < 1 or size % order or not is_power_of_two(size // order):
        raise ValueError(f"{given.op}: size is {size}, expected {order} times a power of two")
    if inner < 1 or width % (size * inner):
        raise ValueError(f"{given.op}: x has {width} columns, size {size} times inner {inner} does not divide them")


@operator(_check_hadamard_rows, lambda given: given.x.new_empty(given.x.shape))
def _hadamard_rows(x: Tensor, matrix: Tensor | None, size: int, inner: int) -> Tensor:
    order = 1 if matrix is None else len(matrix)
    parts = butterflies(x.float().unflatten(-1, (-1, order, size // order, inner)), -2)
    if matrix is not None:
        columns = matrix[:, :, None, None].unbind(1)  # each [order, 1, 1]
        total = parts[..., :1, :, :] * columns[0]
        for j in range(1, order):
            total = total + parts[..., j : j + 1, :, :] * columns[j]
        parts = total
    return (parts.flatten(-4) * (1 / math.sqrt(size))).to(x.dtype)


def hadamard_rows(x: Tensor, how: Hadamard) -> Tensor:
    """float ``[..., width]`` -> ``[..., width]`` of x's dtype: each row times the matrix of ``how``.

    In float32: first sums and differences of elements 1, 2, 4 .. of the power of two apart, then per output the
    products with the matrix of the order one by one, in ascending order of the inputs; once times 1 / sqrt(size), once
    rounded. ValueError where matrices do not divide the width. On a GPU x is bfloat16.
    """
    return x if how.is_nothing else _hadamard_rows(x, matrix_on(how.order, x.device), how.size, how.inner)


@functools.cache
def matrix_on(order: int, device: torch.device) -> Tensor | None:
    """float32 ``[order, order]`` as kernels read it; None for order 1."""
    with torch.inference_mode(False):
        return None if order == 1 else hadamard_matrix(order).to(device, torch.float32)
