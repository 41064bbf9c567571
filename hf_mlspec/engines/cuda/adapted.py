"""How does the CUDA decoder add what adapters add to linears that were put in tiles together?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ... import ops
from ...nn.adapters import LowRank, base_of, is_adapted, low_rank_of
from ...nn.transforms import NONE
from ...precision import Bits
from ..architecture import UnknownArchitecture, linear_shape
from .weights import DenseLinear, JoinedLinear, joined


class AdaptedLinear:
    """A linear, and the low-rank pairs of adapters beside it.

    down float32 ``[ranks, in]`` of all modules, up float32 ``[rank, out]`` of the largest rank, first int32 ``[out]``:
    as of `ops.low_rank_between` and `ops.low_rank_added`. What the adapters read comes in front of the linear, whose
    weights are on their way meanwhile.
    """

    __slots__ = ("down", "first", "linear", "up")

    def __init__(self, linear: JoinedLinear, down: Tensor, up: Tensor, first: Tensor):
        self.linear, self.down, self.up, self.first = linear, down, up, first

    @property
    def extra_bytes(self) -> int:
        """Of the linear, and the copies of the adapters."""
        return self.linear.extra_bytes + sum(part.nbytes for part in (self.down, self.up, self.first))

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]``, as the linear does, the adapters whatever the bits."""
        between, dense = ops.low_rank_between(x, self.down), self.linear
        if isinstance(dense, DenseLinear) and x.dtype == dense.weight.dtype == torch.bfloat16:
            return ops.adapted_linear(x, dense.weight, dense.bias, between, self.up, self.first)
        return ops.low_rank_added(dense(x, bits), between, self.up, self.first)


@torch.no_grad()
def joined_with_adapters(modules: Sequence[nn.Module], name: str) -> JoinedLinear | AdaptedLinear:
    """As `joined`, of linears of which some carry LoRA adapters. UnknownArchitecture where their inputs are ordered or
    rotated: adapters read them as they come."""
    shapes = [linear_shape(module, name) for module in modules]  # of LoRA alone
    pairs = [low_rank_of(module) if is_adapted(module) else None for module in modules]
    bases = [base_of(module) for module in modules]
    if all(pair is None for pair in pairs):
        return joined(bases, name)
    if any(getattr(base, "transform", NONE) is not NONE for base in bases):
        raise UnknownArchitecture(f"its {name} carries adapters and orders or rotates its inputs")
    with torch.inference_mode(False):
        return AdaptedLinear(joined(bases, name), *_as_one(pairs, [out for _, out in shapes]))


def _as_one(pairs: Sequence[LowRank | None], outputs: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of linears whose outputs lie one behind the other, as `AdaptedLinear` holds them."""
    found = [pair for pair in pairs if pair is not None]
    most, device = max(len(pair.down) for pair in found), found[0].down.device
    up = torch.zeros(most, sum(outputs), device=device)
    first = torch.zeros(sum(outputs), dtype=torch.int32, device=device)
    at = ranks = 0
    for pair, out in zip(pairs, outputs, strict=True):
        if pair is not None:
            up[: len(pair.down), at : at + out] = pair.up.T
            first[at : at + out] = ranks
            ranks += len(pair.down)
        at += out
    return torch.cat([pair.down for pair in found]), up, first
