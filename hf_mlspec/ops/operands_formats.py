"""Which operands may the ops of nested weights and of bit-planes have? As operands.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats.mxfp4 import BLOCK
from ..formats.nested.codebooks import LEVELS
from ..formats.planes import GROUP_SIZES, MAX_PLANES, zeros_doubled
from . import tiles_nested_cuda, tiles_planes_cuda
from .operands import check_bf16_linear, check_choice, check_dtype, check_part, check_rows, on_one_device
from .tiles import TILE_BYTES, TILE_OUTPUTS, num_tiles
from .tiles_cuda import PAIR_INPUTS, PAIR_OUTPUTS
from .tiles_nested import LOW_BYTES
from .tiles_planes import PLANE_BYTES

NESTED_BITS = ((16, 16), (4, 16), (4, 8))  # of weight and activation


@on_one_device
def check_nested_linear(
    x: Tensor,
    draft_tiles: Tensor,
    exponent_tiles: Tensor,
    low_tiles: Tensor,
    codebook: Tensor,
    out_features: int,
    bias: Tensor | None,
    weight_bits: int,
    activation_bits: int,
) -> None:
    op = "nested_linear"
    in_features = _check_nested(op, draft_tiles, exponent_tiles, low_tiles, out_features)
    check_part(op, "codebook", codebook, torch.uint8, [LEVELS])
    if (weight_bits, activation_bits) not in NESTED_BITS:
        pairs = ", ".join(f"{weight} and {activation}" for weight, activation in NESTED_BITS)
        raise ValueError(
            f"{op}: weight_bits is {weight_bits} and activation_bits {activation_bits}, choose one of {pairs}"
        )
    check_rows(op, x, bias, in_features, out_features)


@on_one_device
def check_nested_rows(
    ids: Tensor, draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int, scale: float
) -> None:
    op = "nested_rows"
    check_dtype(op, "ids", ids, torch.int32)
    if ids.ndim != 1:
        raise ValueError(f"{op}: ids has shape {list(ids.shape)}, expected [n]")
    _check_nested(op, draft_tiles, exponent_tiles, low_tiles, out_features)
    if out_features < 1:
        raise ValueError(f"{op}: out_features is {out_features}, a table has 1 row or more")
    if not math.isfinite(scale):
        raise ValueError(f"{op}: scale is {scale}, expected a finite number (1.0: the table's rows as they are)")


def check_bf16_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> None:
    check_bf16_linear(x, weight, bias)
    if out_features < len(weight):
        raise ValueError(f"bf16_rows_linear: out_features is {out_features}, weight has {len(weight)} of its rows")


@on_one_device
def check_bitplane_linear(
    x: Tensor,
    plane_tiles: Tensor,
    scale_tiles: Tensor,
    out_features: int,
    bias: Tensor | None,
    group_size: int,
    zero_doubled: int,
    num_planes: int,
) -> None:
    op = "bitplane_linear"
    check_choice(op, "group_size", group_size, GROUP_SIZES)
    in_features, stored = _check_planes(op, plane_tiles, scale_tiles, out_features, group_size)
    if not 1 <= num_planes <= stored:
        raise ValueError(f"{op}: num_planes is {num_planes}, the weight stores {stored}: choose 1 to {stored}")
    least, most = zeros_doubled(stored)
    if not least <= zero_doubled <= most:
        raise ValueError(
            f"{op}: zero_doubled is {zero_doubled}, twice a code of {stored} planes is 0 to {2 * (2**stored - 1)}, "
            f"and bfloat16 holds every level from {least} to {most}"
        )
    check_rows(op, x, bias, in_features, out_features)


def _check_nested(op: str, draft: Tensor, exponents: Tensor, low: Tensor, out_features: int) -> int:
    """in_features of a nested weight in tiles."""
    parts = (("draft_tiles", draft), ("exponent_tiles", exponents), ("low_tiles", low))
    if draft.is_cuda and tiles_nested_cuda.is_packed(draft):
        if exponents.ndim != 3:
            raise ValueError(
                f"{op}: exponent_tiles has shape {list(exponents.shape)}, expected 3 axes from prepack_nested"
            )
        in_features = tiles_nested_cuda.in_features(draft, exponents)
        pairs, chunks = -(-out_features // PAIR_OUTPUTS), -(-in_features // PAIR_INPUTS)
        draft_bytes, low_bytes = tiles_nested_cuda.DRAFT_BYTES, tiles_nested_cuda.LOW_BYTES
        shapes = [pairs, chunks, draft_bytes], [1, in_features // BLOCK, 4], [pairs, chunks, low_bytes]
    else:
        if draft.ndim != 3 or draft.shape[2] != TILE_BYTES:
            raise ValueError(
                f"{op}: draft_tiles has shape {list(draft.shape)}, expected [out / 16, in / {BLOCK}, {TILE_BYTES}] "
                "from prepack_nested"
            )
        tiles, blocks, _ = draft.shape
        if out_features < 0 or num_tiles(out_features) != tiles:
            raise ValueError(
                f"{op}: out_features is {out_features}, draft_tiles hold {tiles} tiles of {TILE_OUTPUTS}"
            )
        in_features = blocks * BLOCK
        shapes = [tiles, blocks, TILE_BYTES], [tiles, blocks, TILE_OUTPUTS], [tiles, blocks, LOW_BYTES]
    for (name, tensor), shape in zip(parts, shapes, strict=True):
        check_part(op, name, tensor, torch.uint8, shape)
    return in_features


def _check_planes(op: str, planes: Tensor, scale: Tensor, out_features: int, group_size: int) -> tuple[int, int]:
    """in_features and stored planes of a weight of bit-planes in tiles."""
    check_dtype(op, "plane_tiles", planes, torch.uint8)
    if out_features < 0:
        raise ValueError(f"{op}: out_features is {out_features}, it cannot be negative")
    if planes.is_cuda and tiles_planes_cuda.is_packed(planes):
        in_features = tiles_planes_cuda.in_features(planes, scale, group_size)
        stored = tiles_planes_cuda.stored_planes(planes)
        plane_shape, scale_shape = tiles_planes_cuda.shapes(out_features, in_features, stored, group_size)
    else:
        if planes.ndim != 4 or not 1 <= planes.shape[0] <= MAX_PLANES:
            raise ValueError(
                f"{op}: plane_tiles has shape {list(planes.shape)}, expected [1 to {MAX_PLANES} planes, out / 16, in "
                f"/ {BLOCK}, {PLANE_BYTES}] from prepack_planes"
            )
        stored, tiles, in_features = planes.shape[0], num_tiles(out_features), planes.shape[2] * BLOCK
        if in_features % group_size:
            raise ValueError(f"{op}: group_size {group_size} does not divide in_features = {in_features}")
        plane_shape = [stored, tiles, planes.shape[2], PLANE_BYTES]
        scale_shape = [tiles, in_features // group_size, TILE_OUTPUTS]
    check_part(op, "plane_tiles", planes, torch.uint8, plane_shape)
    check_part(op, "scale_tiles", scale, torch.float16, scale_shape)
    return in_features, stored
