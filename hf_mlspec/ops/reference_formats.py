"""What do the ops of nested weights and of bit-planes compute, in plain torch? As reference.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import mxfp4, nested
from ..formats import planes as bitplanes
from ..formats.packing import unpack_nibbles
from . import operands_formats, tiles_nested, tiles_planes
from .reference import bf16_product, bias_of, finish, in_slices, integer_product, rounded, tiles_of
from .tiles import TILE_OUTPUTS
from .tiles_formats import nested_on_cpu_order, planes_on_cpu_order


def nested_linear(
    x: Tensor,
    draft_tiles: Tensor,
    exponent_tiles: Tensor,
    low_tiles: Tensor,
    codebook: Tensor,
    out_features: int,
    bias: Tensor | None,
    weight_bits: int,
    activation_bits: int,
) -> Tensor:
    """``x [..., in]`` times the weight, plus bias: ``[..., out]`` in x.dtype. 16 weight bits: what ``bf16_linear``
    computes on the joined weight; 4: what ``mxfp4_linear`` computes, with the codebook's levels."""
    operands_formats.check_nested_linear(
        x, draft_tiles, exponent_tiles, low_tiles, codebook, out_features, bias, weight_bits, activation_bits
    )
    parts = nested_on_cpu_order(draft_tiles, exponent_tiles, low_tiles, out_features)

    def part(rows: slice) -> Tensor:
        packed, scale, low, high = _unpacked(parts, tiles_of(rows), rows.stop - rows.start)
        if weight_bits == 16:
            return bf16_product(x, nested.join(packed, scale, low, high).to, bias_of(bias, rows))
        if activation_bits == 16:
            draft = nested.dequantize_draft
            return bf16_product(x, lambda dtype: draft(packed, scale, codebook, dtype), bias_of(bias, rows))
        codes = nested.draft_levels(codebook)[unpack_nibbles(packed).int()]
        return integer_product(x, codes, nested.draft_scales(scale).double(), mxfp4.BLOCK, 8, bias_of(bias, rows))

    return in_slices(part, out_features, x.shape[-1])


def nested_rows(
    ids: Tensor, draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int, scale: float
) -> Tensor:
    """Exact rows of the table, times scale, bfloat16 ``[n, in]``; only the tiles that hold them are unpacked."""
    operands_formats.check_nested_rows(ids, draft_tiles, exponent_tiles, low_tiles, out_features, scale)
    parts = nested_on_cpu_order(draft_tiles, exponent_tiles, low_tiles, out_features)
    ids = ids.long().clamp(0, out_features - 1)
    unpacked = _unpacked(parts, ids // TILE_OUTPUTS, len(ids) * TILE_OUTPUTS)
    place = torch.arange(len(ids), device=ids.device) * TILE_OUTPUTS + ids % TILE_OUTPUTS
    rows = nested.join(*(plane[place] for plane in unpacked))
    return rows if scale == 1 else (rows.float() * scale).to(rows.dtype)


def bf16_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``bf16_linear``: away from GPUs the bits of an output do not depend on how many there are."""
    operands_formats.check_bf16_rows_linear(x, weight, bias, out_features)
    return torch.ops.mlspec.bf16_linear.default(x, weight, bias)


def bitplane_linear(
    x: Tensor,
    plane_tiles: Tensor,
    scale_tiles: Tensor,
    out_features: int,
    bias: Tensor | None,
    group_size: int,
    zero_doubled: int,
    num_planes: int,
) -> Tensor:
    """x rounded to bfloat16 times what the first ``num_planes`` planes mean: ``[..., out]`` in x.dtype."""
    operands_formats.check_bitplane_linear(
        x, plane_tiles, scale_tiles, out_features, bias, group_size, zero_doubled, num_planes
    )
    plane_tiles, scale_tiles = planes_on_cpu_order(plane_tiles, scale_tiles, out_features)

    def part(rows: slice) -> Tensor:
        tiles = tiles_of(rows)
        planes, scale = tiles_planes.unpack(plane_tiles[:, tiles], scale_tiles[tiles], rows.stop - rows.start)
        dense = bitplanes.dequantize(planes, scale, zero_doubled, num_planes)  # level x scale does not fit bfloat16
        return finish(F.linear(rounded(x), dense), bias_of(bias, rows), x.dtype)

    return in_slices(part, out_features, x.shape[-1])


def _unpacked(parts: tuple[Tensor, ...], tiles: slice | Tensor, out_features: int) -> tuple[Tensor, ...]:
    return tiles_nested.unpack(*(part[tiles] for part in parts), out_features)
