"""Who orders a nested or bit-plane weight for the kernels of a device? CPU and GPU, each with its own tiles."""

from __future__ import annotations

from torch import Tensor

from ..formats.mxfp4 import BLOCK
from . import tiles_nested, tiles_nested_cuda, tiles_planes, tiles_planes_cuda
from .cuda_library import serves


def prepack_nested(packed: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The planes of formats/nested.py on one device -> draft_tiles, exponent_tiles, low_tiles.

    TypeError where one is not uint8, ValueError where their shapes are not those of one weight.
    """
    tiles = tiles_nested_cuda if serves(packed) else tiles_nested
    return tiles.pack(packed, scale, low, high)


def unprepack_nested(
    draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of ``prepack_nested``, bit for bit."""
    tiles = tiles_nested_cuda if tiles_nested_cuda.is_packed(draft_tiles) else tiles_nested
    return tiles.unpack(draft_tiles, exponent_tiles, low_tiles, out_features)


def nested_in_features(draft_tiles: Tensor, exponent_tiles: Tensor) -> int:
    """in_features of a weight from ``prepack_nested``."""
    if tiles_nested_cuda.is_packed(draft_tiles):
        return tiles_nested_cuda.in_features(draft_tiles, exponent_tiles)
    return draft_tiles.shape[1] * BLOCK


def nested_on_cpu_order(
    draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A weight from ``prepack_nested`` in the tiles of the CPU, which can be cut at 16 outputs."""
    if not tiles_nested_cuda.is_packed(draft_tiles):
        return draft_tiles, exponent_tiles, low_tiles
    return tiles_nested.pack(*tiles_nested_cuda.unpack(draft_tiles, exponent_tiles, low_tiles, out_features))


def prepack_planes(planes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[B, out, in / 8]``, float16 ``[out, in / group]`` -> plane_tiles, scale_tiles. Errors as
    ``prepack_nested``."""
    tiles = tiles_planes_cuda if serves(planes) else tiles_planes
    return tiles.pack(planes, scale)


def unprepack_planes(plane_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``prepack_planes``, bit for bit."""
    tiles = tiles_planes_cuda if tiles_planes_cuda.is_packed(plane_tiles) else tiles_planes
    return tiles.unpack(plane_tiles, scale_tiles, out_features)


def stored_planes(plane_tiles: Tensor) -> int:
    """Planes of a weight from ``prepack_planes``."""
    if tiles_planes_cuda.is_packed(plane_tiles):
        return tiles_planes_cuda.stored_planes(plane_tiles)
    return plane_tiles.shape[0]


def planes_on_cpu_order(plane_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """A weight from ``prepack_planes`` in the tiles of the CPU."""
    if not tiles_planes_cuda.is_packed(plane_tiles):
        return plane_tiles, scale_tiles
    return tiles_planes.pack(*tiles_planes_cuda.unpack(plane_tiles, scale_tiles, out_features))


def nested_fits_device(draft_tiles: Tensor) -> bool:
    """Whether a weight is in the tiles that ops on its device read."""
    return tiles_nested_cuda.is_packed(draft_tiles) == serves(draft_tiles)


def planes_fit_device(plane_tiles: Tensor) -> bool:
    """The same of a weight of bit-planes."""
    return tiles_planes_cuda.is_packed(plane_tiles) == serves(plane_tiles)
