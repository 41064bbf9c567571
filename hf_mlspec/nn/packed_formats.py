"""What does a module need to know of a packed format: its tensors' names, how they are tiled, who multiplies them?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import ops
from ..formats import bitplanes, int4, mxfp4, nested
from ..formats.codebooks import codebook_of
from ..formats.weights import BitPlaneWeight, Int4Weight, Mxfp4Weight, NestedWeight
from ..ops.int4 import int4_group_size
from ..ops.nested import nested_fits_device
from ..ops.planes import planes_fit_device
from ..ops.tiles import fit_device
from .switch import PrecisionSwitch

Parts = tuple[torch.Tensor | None, ...]  # codes first; None: a part that this weight does without


@dataclass(frozen=True)
class PackedFormat:
    """A format's tensors in a module: the ends of their names, and the functions between their layouts.

    In tiles, a tensor of three axes is tiles of outputs, one of four planes of them; what has fewer stands beside them
    (``beside``: the parts on disk -> those, None in place of tiles). fits: whether codes are in their device's tiles.
    """

    weight: type[Mxfp4Weight | Int4Weight | NestedWeight | BitPlaneWeight]
    parts: tuple[str, ...]
    prepack: Callable[..., Parts]
    unprepack: Callable[..., Parts]
    multiply: Callable[[torch.Tensor, Parts, int, torch.Tensor | None, PrecisionSwitch], torch.Tensor] | None
    fits: Callable[[torch.Tensor], bool] = fit_device
    beside: Callable[..., Parts] | None = None


def _multiply_mxfp4(
    x: torch.Tensor, tiles: Parts, rows: int, bias: torch.Tensor | None, switch: PrecisionSwitch
) -> torch.Tensor:
    return ops.mxfp4_linear(x, *tiles, rows, bias, switch.activation_bits)


def _multiply_int4(
    x: torch.Tensor, tiles: Parts, rows: int, bias: torch.Tensor | None, switch: PrecisionSwitch
) -> torch.Tensor:
    bits = switch.activation_bits
    group_size = int4_group_size(*tiles)
    if bits == 16 and switch.multiply == "dequant":
        return ops.bf16_linear(x, ops.int4_dequantize(*tiles, rows, group_size), bias)
    return ops.int4_linear(x, *tiles, rows, bias, group_size=group_size, activation_bits=bits)


def _multiply_nested(
    x: torch.Tensor, tiles: Parts, rows: int, bias: torch.Tensor | None, switch: PrecisionSwitch
) -> torch.Tensor:
    draft, exponents, low, _, codebook, escape_rows, escape_weight = tiles
    weight_bits, activation_bits = switch.bits
    escapes = {"escape_rows": escape_rows, "escape_weight": escape_weight} if weight_bits == 16 else {}
    return ops.nested_linear(
        x, draft, exponents, low, codebook, rows, bias,
        weight_bits=weight_bits, activation_bits=activation_bits, **escapes,
    )  # fmt: skip


def _prepack_nested(packed: torch.Tensor, scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor, *rest) -> Parts:
    return (*ops.prepack_nested(packed, scale, low, high), *_beside_nested(packed, scale, low, high, *rest)[3:])


def _beside_nested(packed, scale, low, high, codebook, index, value) -> Parts:
    """In tiles the high planes are part of the low ones, and escapes are whole rows, which a product overwrites."""
    escapes = NestedWeight(packed, scale, low, high, codebook, index, value).escape_rows() or (None, None)
    return None, None, None, high.new_empty(0), codebook, *escapes


def _unprepack_nested(draft, exponents, low_tiles, _, codebook, escape_rows, escape_weight, rows: int) -> Parts:
    packed, scale, low, high = ops.unprepack_nested(draft, exponents, low_tiles, rows)
    if escape_rows is None:
        return packed, scale, low, high, codebook, None, None
    # An escape has no field, and is not 0 in the exact row.
    field = nested.fields_of(low[escape_rows], high[escape_rows])
    row, column = ((field == 0) & (escape_weight != 0)).nonzero().unbind(1)
    index = escape_rows[row] * low.shape[1] + column
    return packed, scale, low, high, codebook, index, escape_weight[row, column]


def _prepack_planes(planes: torch.Tensor, scale: torch.Tensor, zero_doubled: torch.Tensor) -> Parts:
    return *ops.prepack_planes(planes, scale), zero_doubled


def _unprepack_planes(planes: torch.Tensor, scale: torch.Tensor, zero_doubled: torch.Tensor, rows: int) -> Parts:
    return *ops.unprepack_planes(planes, scale, rows), zero_doubled


FORMATS = {
    "mxfp4": PackedFormat(Mxfp4Weight, ("packed", "scale"), ops.prepack_mxfp4, ops.unprepack_mxfp4, _multiply_mxfp4),
    "int4": PackedFormat(
        Int4Weight, ("packed", "scale", "zero"), ops.prepack_int4, ops.unprepack_int4, _multiply_int4
    ),
    "nested": PackedFormat(
        NestedWeight,
        ("packed", "scale", "low", "high", "codebook", "escape_index", "escape_value"),
        _prepack_nested,
        _unprepack_nested,
        _multiply_nested,
        nested_fits_device,
        _beside_nested,
    ),
    "planes": PackedFormat(
        BitPlaneWeight,
        ("planes", "scale", "zero_doubled"),
        _prepack_planes,
        _unprepack_planes,
        None,  # BitPlaneLinear knows the group and the zero, which no tile tells
        planes_fit_device,
        lambda planes, scale, zero_doubled: (None, None, zero_doubled),
    ),
}


def as_one(format: str, weights: Sequence[Parts]) -> Parts:
    """The parts on disk of one weight that has the outputs of several, one behind the other. Codebooks and zero points
    are those of the first."""
    if format != "nested":
        return tuple([_stacked(parts) for parts in zip(*weights, strict=True)])
    *planes, codebooks, _, _ = zip(*weights, strict=True)
    first, index, value = 0, [], []
    for parts in weights:
        rows, in_features = parts[2].shape
        if parts[5] is not None:
            index.append(parts[5] + first * in_features)
            value.append(parts[6])
        first += rows
    escapes = (torch.cat(index), torch.cat(value)) if index else (None, None)
    return *map(_stacked, planes), codebooks[0], *escapes


def _stacked(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """Along the outputs, the last axis but one; of what has no outputs the first."""
    if parts[0] is None or parts[0].ndim < 2:
        return parts[0]
    return torch.cat(parts, dim=parts[0].ndim - 2)


def require_fit(format: str, in_features: int, group_size: int, name: str) -> None:
    """ValueError naming ``name`` where blocks of 32 (MXFP4, nested) or groups do not divide ``in_features``."""
    if format in ("mxfp4", "nested"):
        if in_features % mxfp4.BLOCK:
            what = "MXFP4 needs" if format == "mxfp4" else "nested BF16 needs"
            raise ValueError(f"{name}: in_features is {in_features}, {what} a multiple of {mxfp4.BLOCK}")
        return
    try:
        (int4 if format == "int4" else bitplanes).require_group_size(group_size, in_features)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def zeros(format: str, shape: tuple[int, ...], group_size: int, symmetric: bool, device: torch.device) -> Parts:
    """The parts on disk of an MXFP4 or int4 weight ``[..., out, in]`` whose values are all 0."""
    *outer, in_features = shape
    if format == "mxfp4":
        scale = torch.zeros(*outer, in_features // mxfp4.BLOCK, dtype=torch.uint8, device=device)
        return torch.zeros(*outer, in_features // 2, dtype=torch.uint8, device=device), scale
    code = int4.SYMMETRIC_ZERO * 0x11 if symmetric else 0
    packed = torch.full((*outer, in_features // 2), code, dtype=torch.uint8, device=device)
    scale = torch.ones(*outer, in_features // group_size, dtype=torch.float16, device=device)
    return packed, scale, None if symmetric else torch.zeros_like(scale, dtype=torch.uint8)


def nested_zeros(out_features: int, in_features: int, device: torch.device) -> Parts:
    """The parts on disk of a nested weight whose exact values are all 0, without escapes."""
    low = torch.zeros(out_features, in_features, dtype=torch.uint8, device=device)
    half = torch.zeros(out_features, in_features // 2, dtype=torch.uint8, device=device)
    scale = torch.full(
        (out_features, in_features // nested.BLOCK), nested.SMALLEST_SCALE, dtype=torch.uint8, device=device
    )
    return half, scale, low, half.clone(), codebook_of("lloyd_max", device), None, None


def plane_zeros(out_features: int, in_features: int, num_planes: int, group_size: int, device: torch.device) -> Parts:
    """The parts on disk of a bit-plane weight whose values are all 0."""
    planes = torch.zeros(num_planes, out_features, in_features // 8, dtype=torch.uint8, device=device)
    scale = torch.ones(out_features, in_features // group_size, dtype=torch.float16, device=device)
    zero = bitplanes.zeros_doubled(num_planes)[0]
    zero += zero % 2  # twice a code
    for place in range(num_planes):
        if zero >> (num_planes - place) & 1:
            planes[place] = 0xFF
    return planes, scale, torch.full((1,), zero, dtype=torch.int32, device=device)
