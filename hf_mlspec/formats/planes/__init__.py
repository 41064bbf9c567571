"""Bit-planes: integer codes, most significant bits first, of which any first planes are a weight. Their record."""

from __future__ import annotations

from typing import Any

import torch

from ...precision import Bits, Family
from ..damage import require_positive
from ..int4 import GROUP_OPTION
from ..record import CastWord, Format, Option
from .codes import (
    CAST_GROUP,
    CASTS,
    GROUP_SIZES,
    MAX_PLANES,
    Planes,
    cast_of,
    default_group,
    dequantize,
    join_nibbles,
    pack_planes,
    prefix_levels,
    quantize,
    require_group_size,
    split_nibbles,
    unpack_planes,
    zeros_doubled,
)
from .weight import PlanesParts, PlanesWeight

__all__ = [
    "CASTS",
    "CAST_GROUP",
    "FORMAT",
    "GROUP_SIZES",
    "MAX_PLANES",
    "Planes",
    "PlanesParts",
    "PlanesWeight",
    "cast_of",
    "default_group",
    "dequantize",
    "join_nibbles",
    "pack_planes",
    "prefix_levels",
    "quantize",
    "require_group_size",
    "split_nibbles",
    "unpack_planes",
    "zeros",
    "zeros_doubled",
]


def zeros(
    shape: tuple[int, ...],
    device: torch.device,
    num_planes: int | str = 8,
    group_size: int | None = None,
    **options: Any,
) -> PlanesParts:
    """The parts on disk of a weight ``[out, in]``, or of experts ``[experts, out, in]``, whose values are all 0."""
    (*experts, out_features, in_features), count = shape, cast_of(num_planes).num_planes
    planes = torch.zeros(*experts, count, out_features, in_features // 8, dtype=torch.uint8, device=device)
    groups = in_features // (group_size or default_group(num_planes))
    scale = torch.ones(*experts, out_features, groups, dtype=torch.float16, device=device)
    zero = zeros_doubled(count)[0]
    zero += zero % 2  # twice a code
    for place in range(count):
        if zero >> (count - place) & 1:
            planes[..., place, :, :] = 0xFF
    return PlanesParts(planes, scale, torch.full((*experts, 1), zero, dtype=torch.int32, device=device))


def _group(num_planes: int | str = 8, group_size: int | None = None, **options: Any) -> int:
    return group_size or default_group(num_planes)


def _stored(num_planes: int | str = 8, **options: Any) -> int:
    return cast_of(num_planes).num_planes


FORMAT = Format(
    word="planes",
    title="bit-planes",
    written="bitplanes",
    weight=PlanesWeight,
    zeros=zeros,
    value_checks={"scale": require_positive},
    group=_group,
    require_group=require_group_size,
    bits_per_weight=lambda **options: _stored(**options) + 16 / _group(**options),
    families=(
        Family("planes", tuple([(bits, 16) for bits in range(1, 9)]), examples=("planes1 ... planes8",)),
        Family("int", ((3, 16), (2, 16)), {"int3": 3, "int2": 2}, levels=False, examples=("int3", "int2")),
        Family("ternary", ((2, 16),), {"ternary": 2}, levels=False, examples=("ternary",)),
    ),
    bit_choices=lambda stored: tuple([Bits(count, 16) for count in range(stored, 0, -1)]),
    stored_bits=_stored,
    weights_called="bit-planes",
    remedy="load it with from_pretrained(..., quantization_config=hf_mlspec.MLSpecConfig(format='bitplanes'))",
    level_examples=("planes1 ... planes7",),
    options=(
        Option(
            "num_planes",
            8,
            "1 to 8, or int3, int2, ternary",
            require=cast_of,
            shapes=True,
            read=lambda text: int(text) if text.isdecimal() else text,
        ),
        GROUP_OPTION,
    ),
    casts=tuple([CastWord(word, {"num_planes": word, "group_size": CAST_GROUP}) for word in CASTS]),
    reads_part=True,
    experts=True,
    stays_whole=True,
)
