"""How was a rotated checkpoint turned, and what must its inputs go through before they meet its weights?

QuaRot (arXiv 2404.00456) multiplies the weights of a model by orthogonal matrices and folds the norms' gains into the
linears behind them. Most of it cancels inside the weights and leaves nothing to do. Two Hadamard matrices remain: what
enters o_proj is multiplied across heads, what enters down_proj over its whole width. Weights without them are of no
model. One convention holds for every one of them, with K x K the matrix that is stored and n / K a power of two:

    y = x (hadK kron Sylvester_{n/K})^T / sqrt(n)

so x, seen as [K, n / K], is multiplied by Sylvester's matrix along its last axis and by hadK along its first. hadK is
not symmetric for most K: the transpose matters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .layer import LayerPlan, Stored

# The orders that QuaRot has matrices of, in the order in which it tries them: the first that divides n is taken.
_ORDERS = (172, 156, 140, 108, 60, 52, 36, 28, 40, 20, 12)


@dataclass(frozen=True, eq=False)
class OnlineHadamard:
    """What a layer's input ``[..., size * inner]`` is multiplied by before it meets the weight.

    size: of the whole matrix. inner: how many consecutive inputs go through it side by side: head_dim across heads, 1
    over a whole width. matrix: int8 ``[K, K]`` of +-1 as stored; None: K is 1 and ``size`` a power of two.
    """

    size: int
    inner: int = 1
    matrix: Tensor | None = None

    @property
    def order(self) -> int:
        """K."""
        return 1 if self.matrix is None else self.matrix.shape[0]

    def apply(self, x: Tensor) -> Tensor:
        """``[..., size * inner]`` floats -> the same shape and dtype."""
        parts = x.unflatten(-1, (self.size, self.inner)).transpose(-1, -2)
        return apply_hadamard(parts, self.matrix).transpose(-1, -2).flatten(-2)


@dataclass(frozen=True)
class Rotation:
    """What was done to a whole model. Sizes; a layer's own matrix is in its `RotatedPlan`.

    residual: whether an orthogonal matrix is fused into everything that reads or writes the residual stream. It is not
    stored, and nothing undoes it. folded_norms: the norms whose gains are in the linears behind them: their own
    weights are to be ones. value_heads: the size of the Hadamard on each head of v_proj's outputs, fused; 0: none.
    o_proj: heads, down_proj: the width of what is multiplied online; 0: nothing is.
    """

    residual: bool
    folded_norms: tuple[str, ...] = ()
    value_heads: int = 0
    o_proj: int = 0
    down_proj: int = 0

    @property
    def online(self) -> bool:
        """Whether the checkpoint needs a model that transforms inputs."""
        return bool(self.o_proj or self.down_proj)


@dataclass(frozen=True)
class RotatedPlan(LayerPlan):
    """A layer of a rotated checkpoint. online: what its input goes through first; None: nothing."""

    online: OnlineHadamard | None = None


def sylvester(size: int) -> Tensor:
    """int8 ``[size, size]`` of +-1, Sylvester's: entry (i, j) is the parity of the ones in i & j. ValueError unless
    ``size`` is a power of two."""
    if not is_power_of_two(size):
        raise ValueError(f"Sylvester's Hadamard matrices have a power of two as their size, not {size!r}")
    matrix = torch.ones(1, 1, dtype=torch.int8)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def order_of(size: int) -> int | None:
    """The K that QuaRot takes for ``size``: 1 for a power of two; None: it has none."""
    order = next((order for order in _ORDERS if size % order == 0), 1)
    return order if is_power_of_two(size // order) else None


def require_hadamard(matrix: Tensor, what: str) -> Tensor:
    """``[K, K]`` of any number type -> int8; ValueError, which begins with ``what``, unless every entry is 1 or -1 and
    H H^T is K times the identity."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
        raise ValueError(f"{what} has shape {list(matrix.shape)}, a Hadamard matrix is square")
    wide = matrix.to(torch.float64)
    wrong = int((wide.abs() != 1).sum())  # NaN counts
    if wrong:
        raise ValueError(f"{what} holds {wrong} numbers other than 1 and -1: it is no Hadamard matrix")
    order = matrix.shape[0]
    off = int((wide @ wide.T != order * torch.eye(order, dtype=torch.float64)).any(1).sum())
    if off:
        raise ValueError(f"{what} is no Hadamard matrix: {off} of its {order} rows are not orthogonal to the others")
    return wide.to(torch.int8)


def stored_hadamard(stored: Stored | None, size: int, what: str, inner: int = 1) -> OnlineHadamard:
    """The matrix over ``size`` with the K x K part that a checkpoint has, or has to have.

    ValueError, which begins with ``what``, where it is missing though ``size`` is no power of two, of an order that
    leaves no power of two, or no Hadamard matrix.
    """
    if stored is None:
        if is_power_of_two(size):
            return OnlineHadamard(size, inner)
        order = order_of(size)
        expected = f"[{order}, {order}]" if order else "of an order that leaves a power of two"
        raise ValueError(
            f"{what} is missing: {size} is no power of two, and the Hadamard matrix {expected} that inputs are "
            "multiplied by is part of the checkpoint; download it again"
        )
    order = stored.shape[0] if stored.shape else 0
    if not order or size % order or not is_power_of_two(size // order):
        raise ValueError(
            f"{stored.place} has shape {list(stored.shape)}: {size} inputs are not its order times a power of two"
        )
    return OnlineHadamard(size, inner, require_hadamard(stored.load(), stored.place))


def require_heads(heads: int, head_dim: int, what: str) -> None:
    """ValueError, which begins with ``what``, where the Hadamard over all inputs of o_proj that QuaRot fuses into the
    weight is not the one across heads times the one within them, which its inputs go through: for 20 heads of 128 it
    is not, and such a checkpoint computes another function than its model."""
    fused, online = order_of(heads * head_dim), order_of(heads)
    if not is_power_of_two(head_dim) or fused is None or fused != online:
        raise ValueError(
            f"{what}: {heads} heads of {head_dim} cannot be rotated as QuaRot does: o_proj's weight has a Hadamard "
            f"matrix of order {fused} fused, its inputs one of order {online}, and these do not cancel"
        )


def apply_hadamard(x: Tensor, matrix: Tensor | None = None) -> Tensor:
    """x ``[..., n]`` floats, hadK ``[K, K]`` of +-1 or None (K = 1) -> x (hadK kron Sylvester_{n/K})^T / sqrt(n).

    The sums are taken in float32, in float64 for float64; the result has x's dtype. ValueError unless n / K is a power
    of two.
    """
    size = x.shape[-1]
    order = 1 if matrix is None else matrix.shape[0]
    if size % order or not is_power_of_two(size // order):
        raise ValueError(f"the last axis has {size} elements, expected {order} times a power of two")
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    parts = _butterflies(wide.unflatten(-1, (order, size // order)))
    if matrix is not None:
        parts = matrix.to(parts) @ parts
    return (parts.flatten(-2) / math.sqrt(size)).to(x.dtype)


def _butterflies(x: Tensor) -> Tensor:
    """``[..., n]`` times Sylvester's matrix, in log2 n steps of sums and differences."""
    size, half = x.shape[-1], 1
    while half < size:
        pairs = x.unflatten(-1, (-1, 2, half))
        low, high = pairs.unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return x
