"""What of a packed weight do other people's layouts hold? Integer codes with scales and zero points, in plain order.

A layer that a layout cannot say is one ValueError: the layer's name and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..formats import Int4Weight, Mxfp4Weight, PackedWeight, PlanesWeight
from ..formats.int4 import SYMMETRIC_ZERO
from ..formats.mxfp4 import BLOCK
from ..formats.packing import unpack_nibbles
from ..formats.planes import unpack_planes
from .scales import Groups


@dataclass(frozen=True)
class Kind:
    """How a layer is stored, as far as a config describes it; layers of one kind share its settings.

    bits: of a code. group_size: inputs that share a scale. symmetric: no zero points of its own. ordered: groups are
    not consecutive inputs. floating: the codes are E2M1 numbers, with E8M0 scales, not integers.
    """

    bits: int
    group_size: int
    symmetric: bool
    ordered: bool
    floating: bool = False

    def __str__(self) -> str:
        if self.floating:
            return "MXFP4"
        zeros, order = "symmetric" if self.symmetric else "with zero points", ", act-order" if self.ordered else ""
        return f"{self.bits} bits, groups of {self.group_size}, {zeros}{order}"


class Writer(Protocol):
    """Writes one kind of checkpoint, the pair of a `Reader`.

    method: ``quantization_config["quant_method"]``. title: what people call it. In all of it order is int64 ``[in]``:
    column j of the weight multiplies input ``order[j]``; None: the inputs as they come.
    """

    method: str
    title: str

    def kind(self, weight: PackedWeight, order: Tensor | None = None) -> Kind:
        """How the layer will be stored. ValueError naming layer and reason where the layout cannot say it."""

    def tensors(self, weight: PackedWeight, order: Tensor | None = None) -> dict[str, Tensor]:
        """The layer's tensors, by what their names have behind the layer's own: read back they are the same values,
        and the same bits where ``order`` has the inputs of every group ascending. ValueError as ``kind``."""

    def config(self, kinds: Mapping[str, Kind], kept: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a model with these layers, by name, and ``kept`` dense ones.

        ValueError naming a layer where one config cannot describe them all."""


def kind_of(weight: PackedWeight, order: Tensor | None) -> Kind:
    """What a weight is, whoever writes it. ValueError for one that no other layout has."""
    if isinstance(weight, Mxfp4Weight):
        return Kind(4, BLOCK, True, moves(order), floating=True)
    groups = groups_of(weight, order)
    symmetric = not isinstance(weight, Int4Weight) or weight.symmetric
    return Kind(groups.bits, groups.size, symmetric, groups.order is not None)


def groups_of(weight: PackedWeight, order: Tensor | None) -> Groups:
    """Scales and zero points of integer codes. ValueError for other weights, and for planes whose zero is not the
    middle of the codes."""
    kept = order if moves(order) else None
    if isinstance(weight, Int4Weight):
        zero = weight.weight_zero
        zero = torch.full_like(weight.weight_scale, SYMMETRIC_ZERO, dtype=torch.uint8) if zero is None else zero
        return Groups(4, weight.group_size, weight.weight_scale, zero, kept)
    if not isinstance(weight, PlanesWeight):
        raise ValueError(f"{weight.name} is {type(weight).__name__.removesuffix('Weight')}: it has no integer codes")
    middle = 1 << (weight.num_planes - 1)
    if weight.num_planes < 2 or weight.zero_doubled != 2 * middle:
        raise ValueError(
            f"{weight.name}: the codes of its {weight.num_planes} bit-planes are 0 at {weight.zero_doubled / 2:g}; "
            f"integers of two or more bits that are 0 at the middle one can be written, here {middle}"
        )
    zero = torch.full_like(weight.weight_scale, middle, dtype=torch.uint8)
    return Groups(weight.num_planes, weight.group_size, weight.weight_scale, zero, kept)


def codes_of(weight: Int4Weight | PlanesWeight, order: Tensor | None) -> Tensor:
    """Its codes, uint8 ``[out, in]``, the inputs as they come."""
    codes = unpack_nibbles(weight.weight_packed) if isinstance(weight, Int4Weight) else unpack_planes(
        weight.weight_planes
    )
    return codes if order is None else codes.index_select(-1, torch.argsort(order))


def group_index(groups: Groups, in_features: int) -> Tensor:
    """int32 ``[in]``: the group of every input."""
    places = torch.arange(in_features, dtype=torch.int32)
    places = places if groups.order is None else torch.argsort(groups.order).to(torch.int32)
    return places // groups.size


def moves(order: Tensor | None) -> bool:
    """Whether an order is another one than that of the inputs."""
    return order is not None and not torch.equal(order.long(), torch.arange(order.numel()))
