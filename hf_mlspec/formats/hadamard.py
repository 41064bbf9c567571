"""By which Hadamard matrix are activations of a given width rotated, and where do its entries come from?

A matrix H of order n has entries 1 and -1 and H H^T = n I. One of order m 2^k is the product H_m kron S of
one of order m and Sylvester's S. A width with such an order is rotated whole, another one in blocks of its
largest power of two.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Paley (J. Math. Phys. 12, 1933): q + 1 of a prime q = 3 mod 4, and 2 (q + 1) of a prime q = 1 mod 4.
_PALEY_ONE = {12: 11, 20: 19, 60: 59, 108: 107, 140: 139}
_PALEY_TWO = {28: 13, 36: 17, 76: 37}
# Goethals and Seidel (J. Austral. Math. Soc. 11, 1970): four circulants of n rows whose autocorrelations cancel. Of
# each order (n, multiplier, where the four first rows are 1); a row is 1 on whole orbits of the multiplier, of which
# the least numbers are given. A search over unions of orbits found these.
_FOUR_CIRCULANTS = {
    52: (13, 12, ((0, 2, 4, 5), (0, 1, 4, 6), (0, 1, 3, 4), (0, 1))),
    156: (39, 16, ((0, 2, 4, 6, 8, 12, 17), (0, 3, 4, 6, 8, 14, 17, 19), (0, 1, 2, 12, 13, 14),
                   (0, 3, 4, 7, 8, 12, 13, 14, 26))),
    172: (43, 4, ((0, 1, 6, 7), (0, 1, 3, 7), (0, 1, 2, 3), (0, 2, 7))),
}  # fmt: skip
ORDERS = (1, *sorted((*_PALEY_ONE, *_PALEY_TWO, *_FOUR_CIRCULANTS, 40)))


@dataclass(frozen=True)
class Hadamard:
    """What rotates rows ``[..., width]``: as ``[blocks, order, 2^k, inner]``, over the two axes in the middle.

    size: order * 2^k, of one matrix. inner: how many consecutive elements go through it side by side: the size of a
    head where heads are mixed, else 1. Size 1 changes nothing. y = x (H_order kron S_{2^k})^T / sqrt(size).
    """

    size: int = 1
    order: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"a Hadamard matrix of order {self.order}: choose one of {list(ORDERS)}")
        powers, rest = divmod(self.size, self.order)
        if rest or not is_power_of_two(powers) or self.inner < 1:
            raise ValueError(
                f"a Hadamard matrix of size {self.size} over {self.inner} elements is none of order {self.order}: its "
                "size is the order times a power of two"
            )

    @property
    def is_nothing(self) -> bool:
        return self.size == 1

    def require_width(self, width: int, what: str) -> None:
        """ValueError, which begins with ``what``, unless whole matrices make up ``width``."""
        if not width or width % (self.size * self.inner):
            raise ValueError(
                f"{what}: Hadamard matrices of size {self.size} over {self.inner} neighbours do not divide {width} "
                "inputs: the record belongs to another layer"
            )

    def rotate(self, x: Tensor, *, back: bool = False) -> Tensor:
        """float64 ``[..., width]`` -> the same, times the matrix, or back from it: for folding into weights."""
        parts = x.double().unflatten(-1, (-1, self.order, self.size // self.order, self.inner))
        matrix = hadamard_matrix(self.order).to(parts)
        turned = torch.einsum("ij,...bjkl->...bikl", matrix.T if back else matrix, parts)
        return (butterflies(turned, -2) / math.sqrt(self.size)).flatten(-4)


def is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def fitting_hadamard(width: int, inner: int = 1) -> Hadamard:
    """What rotates ``width`` elements, each of ``inner`` neighbours: all at once where an order fits, the smallest
    one, else blocks of the largest power of two that divides ``width``, which is 1 for an odd one."""
    order = next((order for order in ORDERS if width % order == 0 and is_power_of_two(width // order)), None)
    return Hadamard(width & -width, 1, inner) if order is None else Hadamard(width, order, inner)


def butterflies(x: Tensor, axis: int = -1) -> Tensor:
    """x times Sylvester's matrix along an axis of 2^k elements: for pairs 1, 2, 4 .. apart the sum and the
    difference. The order of these additions is the one that all kernels keep."""
    x, half = x.movedim(axis, -1), 1
    while half < x.shape[-1]:
        low, high = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return x.movedim(-1, axis)


@functools.cache
def hadamard_matrix(order: int) -> Tensor:
    """int8 ``[order, order]`` of 1 and -1, its first column 1; not to be written to. ValueError for an order that is
    none of ORDERS."""
    if order not in ORDERS:
        raise ValueError(f"a Hadamard matrix of order {order}: choose one of {list(ORDERS)}")
    if order == 1:
        return torch.ones(1, 1, dtype=torch.int8)
    if order == 40:
        twenty = hadamard_matrix(20)
        return torch.cat((torch.cat((twenty, twenty), 1), torch.cat((twenty, -twenty), 1)))
    if order in _PALEY_ONE:
        matrix = _paley_one(_PALEY_ONE[order])
    elif order in _PALEY_TWO:
        matrix = _paley_two(_PALEY_TWO[order])
    else:
        matrix = _four_circulants(*_FOUR_CIRCULANTS[order])
    return (matrix * matrix[:, :1]).to(torch.int8)


def _residues(q: int) -> Tensor:
    """``[q, q]``: whether i - j is a square modulo the prime q (1), none (-1), or zero (0)."""
    character = torch.full((q,), -1, dtype=torch.int64)
    character[[i * i % q for i in range(q)]] = 1
    character[0] = 0
    index = torch.arange(q)
    return character[(index[:, None] - index) % q]


def _bordered(residues: Tensor, below: int) -> Tensor:
    q = len(residues)
    whole = torch.zeros(q + 1, q + 1, dtype=torch.int64)
    whole[0, 1:], whole[1:, 0], whole[1:, 1:] = 1, below, residues
    return whole


def _paley_one(q: int) -> Tensor:
    return _bordered(_residues(q), -1) + torch.eye(q + 1, dtype=torch.int64)


def _paley_two(q: int) -> Tensor:
    conference, one = _bordered(_residues(q), 1), torch.eye(q + 1, dtype=torch.int64)
    return torch.kron(conference, torch.tensor([[1, 1], [1, -1]])) + torch.kron(one, torch.tensor([[1, -1], [-1, -1]]))


def _four_circulants(n: int, multiplier: int, ones: tuple[tuple[int, ...], ...]) -> Tensor:
    a, b, c, d = (_circulant(n, multiplier, least) for least in ones)
    b, c, d = b.flip(1), c.flip(1), d.flip(1)  # B R, with R the matrix that has ones on its other diagonal
    bt, ct, dt = (circulant.flip(1).T.flip(1) for circulant in (b, c, d))  # B^T R
    rows = [[a, b, c, d], [-b, a, dt, -ct], [-c, -dt, a, bt], [-d, ct, -bt, a]]
    return torch.cat([torch.cat(row, 1) for row in rows])


def _circulant(n: int, multiplier: int, least: tuple[int, ...]) -> Tensor:
    """``[n, n]``, its first row 1 on the orbits of these numbers, else -1."""
    row = torch.full((n,), -1, dtype=torch.int64)
    for number in least:
        place = number
        while row[place] < 0:
            row[place] = 1
            place = place * multiplier % n
    index = torch.arange(n)
    return row[(index - index[:, None]) % n]
