"""What does a module need to know of a 4-bit format: names of its tensors, how they are tiled, who multiplies them?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import ops
from ..formats import int4, mxfp4
from ..formats.weights import Int4Weight, Mxfp4Weight
from ..ops.tiles import int4_group_size
from .switch import PrecisionSwitch

Parts = tuple[torch.Tensor | None, ...]  # codes, scales (and zero points, None when symmetric)


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


@dataclass(frozen=True)
class PackedFormat:
    """A format's tensors in a module: the ends of their names, and the functions between their layouts."""

    weight: type[Mxfp4Weight] | type[Int4Weight]
    parts: tuple[str, ...]
    prepack: Callable[..., Parts]
    unprepack: Callable[..., Parts]
    multiply: Callable[[torch.Tensor, Parts, int, torch.Tensor | None, PrecisionSwitch], torch.Tensor]


FORMATS = {
    "mxfp4": PackedFormat(Mxfp4Weight, ("packed", "scale"), ops.prepack_mxfp4, ops.unprepack_mxfp4, _multiply_mxfp4),
    "int4": PackedFormat(
        Int4Weight, ("packed", "scale", "zero"), ops.prepack_int4, ops.unprepack_int4, _multiply_int4
    ),
}


def require_fit(format: str, in_features: int, group_size: int, name: str) -> None:
    """ValueError naming ``name`` where blocks of 32 (MXFP4) or groups (int4) do not divide ``in_features``."""
    if format == "mxfp4":
        if in_features % mxfp4.BLOCK:
            raise ValueError(f"{name}: in_features is {in_features}, MXFP4 needs a multiple of {mxfp4.BLOCK}")
        return
    try:
        int4.require_group_size(group_size, in_features)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def zeros(format: str, shape: tuple[int, ...], group_size: int, symmetric: bool, device: torch.device) -> Parts:
    """The parts on disk of a weight ``[..., out, in]`` whose values are all 0."""
    *outer, in_features = shape
    if format == "mxfp4":
        scale = torch.zeros(*outer, in_features // mxfp4.BLOCK, dtype=torch.uint8, device=device)
        return torch.zeros(*outer, in_features // 2, dtype=torch.uint8, device=device), scale
    code = int4.SYMMETRIC_ZERO * 0x11 if symmetric else 0
    packed = torch.full((*outer, in_features // 2), code, dtype=torch.uint8, device=device)
    scale = torch.ones(*outer, in_features // group_size, dtype=torch.float16, device=device)
    return packed, scale, None if symmetric else torch.zeros_like(scale, dtype=torch.uint8)
