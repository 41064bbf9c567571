"""Nested BF16: an exact weight whose first 4.25 bits are a draft. Its record, and what its files hold."""

from __future__ import annotations

from typing import Any

import torch

from ...precision import Bits, Family
from ..damage import require_exponents
from ..record import Format, Option
from . import codebooks
from .fields import (
    BLOCK,
    LARGEST_SCALE,
    MANTISSA_BITS,
    SMALLEST_SCALE,
    UNIT_EXPONENT,
    Nested,
    count_fields,
    dequantize_draft,
    draft_levels,
    draft_scales,
    fields_of,
    find_escapes,
    join,
    require_nestable,
    split,
)
from .weight import ESCAPE_TENSORS, NestedParts, NestedWeight

__all__ = [
    "BLOCK",
    "ESCAPE_TENSORS",
    "FORMAT",
    "LARGEST_SCALE",
    "MANTISSA_BITS",
    "SMALLEST_SCALE",
    "UNIT_EXPONENT",
    "Nested",
    "NestedParts",
    "NestedWeight",
    "count_fields",
    "dequantize_draft",
    "draft_levels",
    "draft_scales",
    "fields_of",
    "find_escapes",
    "join",
    "require_nestable",
    "split",
    "zeros",
]


def zeros(shape: tuple[int, ...], device: torch.device, **options: Any) -> NestedParts:
    """The parts on disk of a weight ``[..., out, in]`` whose exact values are all 0, without escapes."""
    *leading, in_features = shape
    low = torch.zeros(shape, dtype=torch.uint8, device=device)
    half = torch.zeros(*leading, in_features // 2, dtype=torch.uint8, device=device)
    scale = torch.full((*leading, in_features // BLOCK), SMALLEST_SCALE, dtype=torch.uint8, device=device)
    codebook = codebooks.codebook_of(codebooks.DEFAULT, device).expand(*leading[:-1], -1).contiguous()
    return NestedParts(half, scale, low, half.clone(), codebook)


def _require_codebook(codebook: object) -> None:
    if not isinstance(codebook, str):
        raise ValueError("expected a name")
    codebooks.require_codebook_name(codebook)


def _as_level(asked: Bits, device: str) -> Bits:
    """"nested" means the draft inside: times int8 activations on a CPU, bfloat16 elsewhere, as "mxfp4" casts."""
    return Bits(4, 8 if device == "cpu" else 16) if asked == Bits(16, 16) else asked


FORMAT = Format(
    word="nested",
    title="nested BF16",
    written="nested-bf16",
    weight=NestedWeight,
    zeros=zeros,
    value_checks={"scale": require_exponents},  # NestedWeight.validate knows of the rest
    group=lambda **options: BLOCK,
    bits_per_weight=lambda **options: 16 + 8 / BLOCK,
    families=(
        Family(
            "nested",
            ((16, 16), (4, 16), (4, 8)),
            {"nested": 16, "nested4": 4},
            examples=("nested", "nested4", "nested4a8"),
        ),
    ),
    bit_choices=lambda stored: (Bits(16, 16), Bits(4, 16), Bits(4, 8)),
    weights_called="nested weights",
    remedy=(
        "nest it with hf_mlspec.nest(model), or load it with from_pretrained(..., quantization_config="
        "hf_mlspec.MLSpecConfig(format='nested-bf16'))"
    ),
    level_examples=("nested",),
    options=(
        Option("codebook", codebooks.DEFAULT, "lloyd_max, mxfp4 or fitted", require=_require_codebook),
    ),
    level_words=("nested", "nested4", "nested4a8"),
    as_level=_as_level,
    reads_part=True,
    experts=True,
    in_place=True,
    stays_whole=True,
)
