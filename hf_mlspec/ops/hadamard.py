"""How are rows, and gated ones, multiplied by a Hadamard matrix, with the same bits on every device and kernel?"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..formats.hadamard import Hadamard, butterflies, hadamard_matrix, is_power_of_two
from .operator import Operands, operator
from .rows import check_gated, gated

MAX_ORDER = 256  # of a matrix; mlspec_hadamard in kernels_ext/cpu/kernels.h


def _check_hadamard_rows(given: Operands) -> None:
    given.require_float("x")
    given.require_axis("x")
    check_matrices(given, "x has", given.x.shape[-1])


def check_matrices(given: Operands, what: str, width: int) -> None:
    """TypeError, ValueError: matrices do not make up a width."""
    order = 1
    if given.matrix is not None:
        order = given.matrix.shape[0] if given.matrix.ndim else 0
        given.require_part("matrix", torch.float32, (order, order))
        if not order or order % 4 or order > MAX_ORDER:
            raise ValueError(f"{given.op}: matrix has {order} rows, expected a multiple of 4 up to {MAX_ORDER}")
    size, inner = given.size, given.inner
    if size < 1 or size % order or not is_power_of_two(size // order):
        raise ValueError(f"{given.op}: size is {size}, expected {order} times a power of two")
    if inner < 1 or width % (size * inner):
        raise ValueError(f"{given.op}: {what} {width} columns, size {size} times inner {inner} does not divide them")


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


def hadamard_rows(x: Tensor, how: Hadamard, *, back: bool = False) -> Tensor:
    """float ``[..., width]`` -> ``[..., width]`` of x's dtype: each row times the matrix of ``how``, or back from it.

    In float32: first sums and differences of elements 1, 2, 4 .. of the power of two apart, then per output the
    products with the matrix of the order one by one, in ascending order of the inputs; once times 1 / sqrt(size), once
    rounded. ValueError where matrices do not divide the width. On a GPU x is bfloat16.
    """
    if how.is_nothing:
        return x
    matrix = matrix_on(how.order, x.device)
    matrix = matrix.T.contiguous() if back and matrix is not None else matrix
    return _hadamard_rows(x, matrix, how.size, how.inner)


def _check_gated_hadamard(given: Operands) -> None:
    check_gated(given)
    check_matrices(given, "gated rows have", given.gate_up.shape[1] // 2)


@operator(_check_gated_hadamard,
          lambda given: given.gate_up.new_empty((len(given.gate_up), given.gate_up.shape[1] // 2)),
          composed_on_cpu=True)  # fmt: skip
def _gated_hadamard(gate_up: Tensor, activation: int, matrix: Tensor | None, size: int, inner: int) -> Tensor:
    return _hadamard_rows(gated(gate_up, activation), matrix, size, inner)


def gated_hadamard(gate_up: Tensor, activation: int, how: Hadamard) -> Tensor:
    """``hadamard_rows(gated(gate_up, activation), how)``, bit for bit; on a GPU in one kernel."""
    if how.is_nothing:
        return gated(gate_up, activation)
    return _gated_hadamard(gate_up, activation, matrix_on(how.order, gate_up.device), how.size, how.inner)


@functools.cache
def matrix_on(order: int, device: torch.device) -> Tensor | None:
    """float32 ``[order, order]`` as kernels read it; None for order 1."""
    with torch.inference_mode(False):
        return None if order == 1 else hadamard_matrix(order).to(device, torch.float32)
