"""How are widths chosen on the way of a step of the CUDA decoder where the host has to know each of them? It waits.

Planes that are streamed are fetched by the host, and kernels for every GPU are told by it how many planes they read.
Where a kernel can choose, it chooses here, too: a prompt has the same widths whether anybody waits or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..ops.planes.choosing import ChooserWeights
from ..precision import Bits
from .blocks import Block
from .features import require_finite
from .foresight import LEAD, announce, is_streamed
from .router import Router


class Told(NamedTuple):
    """What the host learns of a block. width: of the highest score, the narrower of equal ones; None where one is NaN
    or infinite. ahead: what block + LEAD is likely to choose, None where nobody asks or knows. mean: of what the block
    reads, float32 ``[features]`` on the device."""

    width: int | None
    ahead: int | None
    mean: Tensor


class Chooser(Protocol):
    """A router's MLPs where the model is."""

    widths: Sequence[int]

    def begin(self) -> None:
        """A prompt begins."""

    def choose(self, block: int, x: Tensor, foresees: bool = False) -> Told:
        """From a prompt ``[tokens, features]``; waits for the device. foresees: what comes LEAD blocks later, too."""


def _guesses(router: Router, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    return [(own.bias.to(device), own.weight.to(device)) for own in router.ahead]


class Scorers:
    """For every GPU, standardization folded into the first layers: three small kernels and one wait a block."""

    def __init__(self, router: Router, device: torch.device):
        self.widths, self.layers = router.widths, []
        for one in router.of:
            inner, bias = one.folded()
            parts = inner.T, bias, one.outer.weight.T, one.outer.bias
            self.layers.append([part.detach().to(device).contiguous() for part in parts])
        self.ahead = _guesses(router, device)

    def begin(self) -> None:
        """As `Chooser.begin`: nothing is left of the prompt before."""

    def choose(self, block: int, x: Tensor, foresees: bool = False) -> Told:
        """As `Chooser.choose`."""
        features = x.mean(0, keepdim=True, dtype=torch.float32)
        inner, bias, outer, last = self.layers[block]
        scores = torch.addmm(last, F.silu(torch.addmm(bias, features, inner)), outer)
        if foresees and block < len(self.ahead):
            bias, weight = self.ahead[block]
            own, ahead = torch.cat([scores, torch.addmm(bias, features, weight)]).tolist()
        else:
            own, ahead = scores[0].tolist(), None
        chosen = self.widths[own.index(max(own))] if all(map(math.isfinite, own)) else None
        return Told(chosen, None if ahead is None else self.widths[ahead.index(max(ahead))], features[0])


class KernelScorers:
    """The kernel that chooses where nobody waits (device_choice.py), with its bits, and one wait a block."""

    def __init__(self, router: Router, weights: Sequence[ChooserWeights]):
        self.widths, self.weights = router.widths, weights
        self.ahead = _guesses(router, weights[0].inner.device)

    def begin(self) -> None:
        """As `Chooser.begin`."""
        self.weights[0].failed.zero_()  # a step may have set it, of which nobody asks

    def choose(self, block: int, x: Tensor, foresees: bool = False) -> Told:
        """As `Chooser.choose`."""
        own = self.weights[block]
        mean = torch.empty(own.inner.shape[1], device=own.inner.device)
        found = [ops.choose_of_prompt(x, mean, own), own.failed]
        if foresees and block < len(self.ahead):
            bias, weight = self.ahead[block]
            found.append(torch.addmm(bias, mean[None], weight).argmax(-1).int())
        width, fails, *ahead = torch.cat(found).tolist()
        return Told(None if fails else width, self.widths[ahead[0]] if ahead else None, mean)


class ChosenOnHost:
    """Bits of every block of a step over one prompt, chosen from what the block reads. widths: of all blocks. means:
    of all blocks, of what they read, float32 ``[features]``."""

    waits = True

    def __init__(self, scorers: Chooser, blocks: Sequence[Block]):
        self.scorers, self.blocks = scorers, blocks
        scorers.begin()
        self.widest, self.key = Bits(scorers.widths[-1], 16), ()
        self.widths: list[int] = []
        self.means: list[Tensor] = []
        self.streams = any(map(is_streamed, blocks))

    def at(self, block: int, x: Tensor, starts: Tensor) -> Bits:
        """As `BlockBits.at`; waits for the device."""
        width, ahead, mean = self.scorers.choose(block, x, self.streams)
        if ahead is not None:
            announce(self.blocks[block + LEAD], ahead)
        if width is None:
            require_finite(mean[None], self.blocks[block].name)  # raises where x is the reason
            raise FloatingPointError(f"the router scores {self.blocks[block].name} NaN or infinite: train another")
        self.widths.append(width)
        self.means.append(mean)
        return Bits(width, 16)

    def told(self) -> list[int]:
        """The widths of all blocks."""
        return self.widths

    def sufficed(self, widths: list[int]) -> bool:
        """Every block had the planes that it chose."""
        return True
