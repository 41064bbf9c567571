"""Zipper: integer weights as a dense low part, which is a draft, and a sparse high part. Their record."""

from __future__ import annotations

from typing import Any

import torch

from ...precision import Bits, Family
from ..damage import require_positive
from ..record import Format, Option
from .codes import BITS, LOW_BITS, MODES, Split, join, representable, rounded_codes, split
from .rows import CodeRows, codes_of, lowest_of, of_rows, to_rows
from .sparse import (
    INPUTS,
    MAX_INPUTS,
    OUTPUTS,
    SparseCells,
    Values,
    cells_of,
    of_packed,
    of_slots,
    to_dense,
    to_packed,
    to_slots,
)
from .weight import BLOCK, HEADER, HIGH_PARTS, ZipperParts, ZipperWeight, quantize, require_inputs, to_codes, to_planes

__all__ = [
    "ACTIVATION_GROUP",
    "BLOCK",
    "CHOICES",
    "FORMAT",
    "HEADER",
    "HIGH_PARTS",
    "INPUTS",
    "LOW",
    "MAX_INPUTS",
    "MODES",
    "OUTPUTS",
    "WHOLE",
    "CodeRows",
    "SparseCells",
    "Split",
    "Values",
    "ZipperParts",
    "ZipperWeight",
    "activation_group",
    "cells_of",
    "codes_of",
    "join",
    "lowest_of",
    "of_packed",
    "of_rows",
    "of_slots",
    "quantize",
    "representable",
    "require_inputs",
    "rounded_codes",
    "split",
    "to_codes",
    "to_dense",
    "to_packed",
    "to_planes",
    "to_rows",
    "to_slots",
    "zeros",
]

WHOLE, LOW = Bits(6, 16), Bits(4, 16)  # names of both parts and of the low one alone, whatever K and k1 are
# With 8 or 4 bits the low part meets integers, one scale a row and ACTIVATION_GROUP inputs; the high part never does.
CHOICES = tuple([Bits(part.weight, bits) for part in (WHOLE, LOW) for bits in (16, 8, 4)])
ACTIVATION_GROUP = 64


def activation_group(in_features: int) -> int:
    """Inputs that share a scale of integers: 64, or 32 where 64 do not divide ``in_features``."""
    return ACTIVATION_GROUP if in_features % ACTIVATION_GROUP == 0 else BLOCK


def zeros(
    shape: tuple[int, int], device: torch.device, bits: int = 6, low_bits: int = 4, mode: str = "exact",
    high_part: str = "device", **options: Any,
) -> ZipperParts:  # fmt: skip
    """The parts on disk of a weight ``[out, in]`` whose values are all 0. ValueError for a split that there is not."""
    Split(bits, low_bits, mode).require()
    out_features, in_features = shape
    planes = torch.zeros(bits, out_features, in_features // 8, dtype=torch.uint8, device=device)
    planes[0] = 0xFF
    scale = torch.ones(out_features, 1, dtype=torch.float16, device=device)
    header = [bits, low_bits, MODES.index(mode), HIGH_PARTS.index(high_part)]
    return ZipperParts(planes, scale, torch.tensor(header, dtype=torch.int32, device=device))


FORMAT = Format(
    word="zipper",
    title="zipper weights",
    weight=ZipperWeight,
    zeros=zeros,
    value_checks={"scale": require_positive},  # ZipperWeight.validate knows of the rest
    group=lambda **options: BLOCK,
    require_group=require_inputs,
    bits_per_weight=lambda bits=6, in_features=4096, **options: bits + 16 / in_features,
    families=(Family("zipper", tuple([tuple(bits) for bits in CHOICES]),
                     {"zipper": WHOLE.weight, "zipper-low": LOW.weight},
                     examples=("zipper", "zipper-low", "zippera4")),),
    bit_choices=lambda stored: CHOICES,
    weights_called="zipper weights",
    remedy=(
        "load it with from_pretrained(..., quantization_config=hf_mlspec.MLSpecConfig(format='zipper', mode='clamp'))"
    ),
    level_examples=("zipper-low",),
    level_words=("zipper-low",),
    options=(
        Option("bits", 6, "4 to 8 bits of a weight, both parts", BITS, shapes=True, read=int),
        Option("low_bits", 4, "of these the low part's, 2 to bits - 2", LOW_BITS, shapes=True, read=int),
        Option("mode", "exact", "exact, paper (halved low part) or clamp (the best draft)", MODES, shapes=True),
        Option("high_part", "device", "device, or host: on a GPU the CPU adds the high part", HIGH_PARTS, shapes=True),
    ),
    require_together=lambda bits=6, low_bits=4, mode="exact", **others: Split(bits, low_bits, mode).require(),
    reads_part=True,
    stays_whole=True,
)  # fmt: skip
