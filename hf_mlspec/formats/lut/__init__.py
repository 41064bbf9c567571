"""Lookup-table planes: bits looked up in a float16 table per row, one for each number of planes. Their record."""

from __future__ import annotations

from typing import Any

import torch

from ..damage import require_finite
from ..planes import FORMAT as PLANES
from ..record import Format, Option
from .weight import (
    INPUTS,
    WHY_NOT_QUANTIZED,
    LutParts,
    LutWeight,
    least_planes_of,
    require_widths,
    table_columns,
    table_start,
)

__all__ = [
    "FORMAT",
    "INPUTS",
    "LutParts",
    "LutWeight",
    "least_planes_of",
    "require_widths",
    "table_columns",
    "table_start",
    "zeros",
]

NUM_PLANES = next(option for option in PLANES.options if option.name == "num_planes")


def zeros(
    shape: tuple[int, int], device: torch.device, num_planes: int = 8, least_planes: int = 1, **options: Any
) -> LutParts:
    """The parts on disk of a weight ``[out, in]`` whose values are all 0. ValueError for widths that there are not."""
    require_widths(num_planes, least_planes)
    out_features, in_features = shape
    planes = torch.zeros(num_planes, out_features, in_features // 8, dtype=torch.uint8, device=device)
    columns = table_columns(num_planes, least_planes)
    return LutParts(planes, torch.zeros(out_features, columns, dtype=torch.float16, device=device))


def _require_count(count: Any) -> None:
    require_widths(8, count)


FORMAT = Format(
    word="lut",
    title="lookup-table planes",
    written="lut-planes",
    weight=LutWeight,
    zeros=zeros,
    value_checks={"tables": require_finite},
    group=lambda **options: INPUTS,
    bits_per_weight=lambda num_planes=8, **options: num_planes,  # tables belong to rows: 16 values take 0.06 at 4096
    families=PLANES.families[:1],
    bit_choices=PLANES.bit_choices,
    stored_bits=lambda num_planes=8, **options: num_planes,
    least_bits=lambda least_planes=1, **options: least_planes,
    weights_called="planes with tables",
    remedy="load a checkpoint that has them (Any-Precision) with hf_mlspec.load",
    level_examples=("planes1 ... planes7",),  # as of bit-planes: messages list each word once
    options=(NUM_PLANES, Option("least_planes", 1, "of the smallest table, 1 to num_planes", require=_require_count,
                                shapes=True, read=int)),
    reads_part=True,
    stays_whole=True,
    why_not_quantized=WHY_NOT_QUANTIZED,
)  # fmt: skip
