"""What lies at a place in a model or in a layer, and what does a norm there multiply by?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .description import Description
from .parts import Norm, UnknownArchitecture


def part(whole: nn.Module, place: str, get: Callable[[nn.Module, str], Any] = nn.Module.get_submodule) -> Any:
    """The module, or what else is got, of a model or a layer at a place that its description names."""
    for choice in place.split(" | "):
        try:
            return get(whole, choice)
        except AttributeError:
            continue
    name = type(whole).__name__
    raise UnknownArchitecture(f"its description names {place}, which its {name} does not have")


def norm_of(norm: nn.Module, entry: Description, width: int) -> Norm:
    """1 is added to the weight where the architecture stores the difference from 1; without a weight all are 1."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if weight is None:
        return Norm(torch.ones(width))
    scale = (weight.detach().float() + (1.0 if entry.norm.endswith("plus one") else 0.0)).contiguous()
    return Norm(scale, None if bias is None else bias.detach().float().contiguous())
