"""What will a block that is still to come choose? A linear map from the input of an earlier one guesses it.

A choice is made where a block begins, which is too late to fetch planes for it. A guess is made LEAD blocks before: a
wrong one costs time, since what is read follows the choice itself. Ridge regression, in closed form, from the features
of training queries to what the router chose for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .blocks import Block

LEAD = 2  # blocks: a layer
_RIDGE = 0.1  # of the mean square of a feature


class Foresight(nn.Module):
    """Of one block: scores of its widths from the features of the block LEAD before it, each score a linear map."""

    def __init__(self, features: int, widths: int):
        super().__init__()
        self.register_buffer("weight", torch.zeros(features, widths))
        self.register_buffer("bias", torch.zeros(widths))

    def forward(self, features: Tensor) -> Tensor:
        """float32 ``[rows, features]`` -> ``[rows, widths]``."""
        return torch.addmm(self.bias, features, self.weight)

    @torch.no_grad()
    def fit(self, features: Tensor, chosen: Tensor) -> None:
        """features: float32 ``[queries, features]`` of the earlier block. chosen: int64 ``[queries]``, which width."""
        mean, spread = features.mean(0), features.std(0, correction=0).clamp_min(1e-3)
        standard = ((features - mean) / spread).double()
        wanted = torch.nn.functional.one_hot(chosen, len(self.bias)).double()
        share = wanted.mean(0)
        alike = standard @ standard.T / standard.shape[1]
        alike.diagonal().add_(_RIDGE)
        found = standard.T @ torch.linalg.solve(alike, wanted - share) / standard.shape[1]
        self.weight.copy_(found / spread[:, None])
        self.bias.copy_(share - mean.double() @ (found / spread[:, None]))


def announce(block: Block, width: int) -> None:
    """Tell whoever streams the planes of a block how many will be read, as far as is known."""
    for linear in block.linears.values():
        if linear.source is not None:
            linear.source.expect(linear, width)


def is_streamed(block: Block) -> bool:
    """Whether planes of the block may have to be fetched."""
    return any(linear.source is not None for linear in block.linears.values())


def indices(chosen: Sequence[int], widths: Sequence[int], device: torch.device) -> Tensor:
    """int64 ``[queries]``: which of the widths each is."""
    return torch.tensor([widths.index(width) for width in chosen], device=device)
