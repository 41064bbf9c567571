"""How are widths chosen on the way of a step of the CUDA decoder where the host has to know each of them? It waits.

Planes that are streamed are fetched by the host, and kernels for every GPU are told by it how many planes they read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..precision import Bits
from .blocks import Block
from .features import require_finite
from .foresight import LEAD, announce
from .router import Router


class Scorers:
    """A router's MLPs where the model is, standardization folded into their first layers: three small kernels and one
    wait a block."""

    def __init__(self, router: Router, device: torch.device):
        self.widths, self.layers = router.widths, []
        for one in router.of:
            inner, bias = one.folded()
            parts = inner.T, bias, one.outer.weight.T, one.outer.bias
            self.layers.append([part.detach().to(device).contiguous() for part in parts])
        self.ahead = [(own.bias.to(device), own.weight.to(device)) for own in router.ahead]

    def choose(self, block: int, features: Tensor, foresees: bool = False) -> tuple[int | None, int | None]:
        """The width of the highest score, the narrower of equal ones; None where one is NaN or infinite. features:
        float32 ``[1, features]``. Then what block + LEAD is likely to
        choose, None where nobody asks or knows."""
        inner, bias, outer, last = self.layers[block]
        scores = torch.addmm(last, F.silu(torch.addmm(bias, features, inner)), outer)
        if foresees and block < len(self.ahead):
            bias, weight = self.ahead[block]
            own, ahead = torch.cat([scores, torch.addmm(bias, features, weight)]).tolist()
        else:
            own, ahead = scores[0].tolist(), None
        chosen = self.widths[own.index(max(own))] if all(map(math.isfinite, own)) else None
        return chosen, None if ahead is None else self.widths[ahead.index(max(ahead))]


class ChosenOnHost:
    """Bits of every block of a step over one prompt, chosen from what the block reads. widths: of all blocks. means:
    of all blocks, of what they read, float32 ``[features]``."""

    waits = True

    def __init__(self, scorers: Scorers, blocks: Sequence[Block]):
        self.scorers, self.blocks = scorers, blocks
        self.widest, self.key = Bits(scorers.widths[-1], 16), ()
        self.widths: list[int] = []
        self.means: list[Tensor] = []
        self.streams = any(linear.source is not None for block in blocks for linear in block.linears.values())

    def at(self, block: int, x: Tensor, starts: Tensor) -> Bits:
        """As `BlockBits.at`; waits for the device."""
        features = x.mean(0, keepdim=True, dtype=torch.float32)
        width, ahead = self.scorers.choose(block, features, self.streams)
        if ahead is not None:
            announce(self.blocks[block + LEAD], ahead)
        if width is None:
            require_finite(features, self.blocks[block].name)  # raises where x is the reason
            raise FloatingPointError(f"the router scores {self.blocks[block].name} NaN or infinite: train another")
        self.widths.append(width)
        self.means.append(features[0])
        return Bits(width, 16)

    def told(self) -> list[int]:
        """The widths of all blocks."""
        return self.widths

    def sufficed(self, widths: list[int]) -> bool:
        """Every block had the planes that it chose."""
        return True
