"""What does a module need to know of a packed format beside its record: how it is tiled, who multiplies it, in what?

Each format's part is registered under its word where its module is defined: linear.py, nested.py, planes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..formats import FORMATS, Parts
from ..ops.tiles import fit_device
from .switch import PrecisionSwitch

if TYPE_CHECKING:
    from .packed import PackedLinear


@dataclass(frozen=True)
class Packing:
    """What modules do with the parts of a format.

    linear: the class that replaces an nn.Linear. In tiles, a tensor of three axes is tiles of outputs, one of four is
    planes of them; parts with fewer axes are kept next to them (``beside``: the parts on disk -> those, None in place
    of tiles). Without prepack and unprepack a weight stays as on disk; without multiply it is dequantized for every
    product. fits: whether codes are in their device's tiles. join: the parts on disk of several weights -> of one with
    the outputs of all, if concatenation is not enough.
    """

    linear: type[PackedLinear]
    prepack: Callable[..., Parts] | None = None
    unprepack: Callable[..., Parts] | None = None
    multiply: Callable[[torch.Tensor, Parts, int, torch.Tensor | None, PrecisionSwitch], torch.Tensor] | None = None
    fits: Callable[[torch.Tensor], bool] = fit_device
    beside: Callable[..., Parts] | None = None
    join: Callable[[Sequence[Parts]], Parts] | None = None


PACKINGS: dict[str, Packing] = {}


def register_packing(packing: Packing) -> None:
    """Under the word of the module's format. ValueError when the format has one."""
    word = packing.linear.format
    if word in PACKINGS:
        raise ValueError(f"format {word!r} has modules already, {PACKINGS[word].linear.__name__}")
    PACKINGS[word] = packing


def unregister_packing(word: str) -> None:
    """Forget the modules of a format; KeyError when it has none."""
    del PACKINGS[word]


def as_one(format: str, weights: Sequence[Parts]) -> Parts:
    """The parts on disk of one weight that has the outputs of several, one behind the other. Codebooks and zero points
    are those of the first."""
    join, parts = PACKINGS[format].join, FORMATS[format].weight.PARTS
    named = [parts(*weight) for weight in weights]
    return join(named) if join is not None else parts(*map(stacked, zip(*named, strict=True)))


def stacked(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """Along the outputs, the last axis but one; of what has no outputs the first."""
    if parts[0] is None or parts[0].ndim < 2:
        return parts[0]
    return torch.cat(parts, dim=parts[0].ndim - 2)
