"""Which rows and matrices must every instruction set multiply alike? Checks that run in other processes, too."""

from __future__ import annotations

import torch

from hf_mlspec import ops
from hf_mlspec.formats.hadamard import ORDERS, Hadamard
from hf_mlspec.ops.hadamard import matrix_on
from hf_mlspec.ops.operator import REFERENCES

CPU = torch.device("cpu")
SIZES = [Hadamard(order * powers, order, inner) for order in ORDERS for powers, inner in
         ((1, 1), (2, 1), (4, 3), (8, 1), (16, 1), (2, 8), (8, 20), (64, 1), (128, 1)) if order * powers * inner < 8192
         and order * powers > 1]  # fmt: skip


def rows_of(how: Hadamard, blocks: int, count: int = 3) -> torch.Tensor:
    """Of numbers of very different sizes, whose sums depend on their order."""
    seed = torch.Generator().manual_seed(how.size)
    shape = count, blocks * how.size * how.inner
    return torch.randn(shape, generator=seed) * torch.exp(3 * torch.randn(shape, generator=seed))


def in_torch(x: torch.Tensor, how: Hadamard) -> torch.Tensor:
    return REFERENCES["hadamard_rows"](x, matrix_on(how.order, x.device), how.size, how.inner)


def check_bits() -> None:
    for how in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = rows_of(how, 1 if how.size > 2000 else 3).clamp(-6e4, 6e4).to(dtype)
            assert torch.equal(ops.hadamard_rows(x, how), in_torch(x, how)), (how, dtype)
