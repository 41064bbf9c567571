"""What are lookup-table planes to the kernels: their op, its plain torch, and their tiles on every device?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...formats.lut import LutWeight, least_planes_of
from ...formats.mxfp4 import BLOCK
from ..cuda_library import serves
from ..operator import Operands, like_x, operator
from ..products import bf16_product, bias_of, in_slices, tiles_of
from ..tiles import TILE_OUTPUTS, num_tiles
from . import tiles, tiles_cuda
from .tiles import MAX_PLANES, PLANE_BYTES


class LutTiles(NamedTuple):
    """On the CPU uint8 ``[planes, ceil(out / 16), in / 32, 64]`` and float16 ``[ceil(out / 16), 16, values]``
    (tiles.py beside this); on a GPU that kernels serve as tiles_cuda.py says."""

    planes: Tensor
    tables: Tensor


def _check_weight(given: Operands) -> tuple[int, int, int]:
    """in_features, fewest planes with a table, and stored planes."""
    planes, tables, out_features = given.plane_tiles, given.table_tiles, given.out_features
    given.require_dtype("plane_tiles", torch.uint8)
    if out_features < 0:
        raise ValueError(f"{given.op}: out_features is {out_features}, it cannot be negative")
    if planes.is_cuda and tiles_cuda.is_packed(planes):
        return _check_pairs(given)
    if planes.ndim != 4 or not 1 <= planes.shape[0] <= MAX_PLANES:
        raise ValueError(
            f"{given.op}: plane_tiles has shape {list(planes.shape)}, expected [1 to {MAX_PLANES} planes, out / 16, "
            f"in / {BLOCK}, {PLANE_BYTES}] from prepack_lut"
        )
    stored, count = planes.shape[0], num_tiles(out_features)
    given.require_part("plane_tiles", torch.uint8, [stored, count, planes.shape[2], PLANE_BYTES])
    columns = tables.shape[2] if tables.ndim == 3 else 0
    least = least_planes_of(stored, columns)
    if not least:
        raise ValueError(
            f"{given.op}: table_tiles has shape {list(tables.shape)}, expected [{count}, {TILE_OUTPUTS}, "
            f"2^{stored + 1} - 2^S] with S from 1 to {stored} from prepack_lut"
        )
    given.require_part("table_tiles", torch.float16, [count, TILE_OUTPUTS, columns])
    return planes.shape[2] * BLOCK, least, stored


def _check_pairs(given: Operands) -> tuple[int, int, int]:
    """The same of a weight in the tiles of a GPU."""
    planes, tables = given.plane_tiles, given.table_tiles
    stored, in_features = tiles_cuda.stored_planes(planes), tiles_cuda.in_features(planes)
    columns = tables.shape[2] if tables.ndim == 3 else 0
    least = least_planes_of(stored, columns)
    possible = min(max(stored, 1), MAX_PLANES)
    plane_shape, table_shape = tiles_cuda.shapes(given.out_features, in_features, possible, columns)
    given.require_part("plane_tiles", torch.uint8, plane_shape)
    if not least:
        raise ValueError(
            f"{given.op}: table_tiles has shape {list(tables.shape)}, expected [{table_shape[0]}, {table_shape[1]}, "
            f"2^{stored + 1} - 2^S] with S from 1 to {stored} from prepack_lut"
        )
    given.require_part("table_tiles", torch.float16, table_shape)
    return in_features, least, stored


def _check_linear(given: Operands) -> None:
    in_features, least, stored = _check_weight(given)
    if not least <= given.num_planes <= stored:
        raise ValueError(
            f"{given.op}: num_planes is {given.num_planes}, the weight has tables of {least} to {stored} bits: choose "
            "one of these"
        )
    given.require_rows(in_features, given.out_features)


@operator(_check_linear, like_x)
def _lut_linear(
    x: Tensor, plane_tiles: Tensor, table_tiles: Tensor, out_features: int, bias: Tensor | None, num_planes: int
) -> Tensor:
    plane_tiles, table_tiles = on_cpu_order(plane_tiles, table_tiles, out_features)

    def part(rows: slice) -> Tensor:
        cut = tiles_of(rows)
        weight = LutWeight(*tiles.unpack(plane_tiles[:, cut], table_tiles[cut], rows.stop - rows.start))
        dense = weight.dequantize(torch.bfloat16, num_planes)
        return bf16_product(x, dense.to, bias_of(bias, rows))

    return in_slices(part, out_features, x.shape[-1])


def lut_linear(
    x: Tensor, plane_tiles: Tensor, table_tiles: Tensor, out_features: int, bias: Tensor | None = None, *,
    num_planes: int,
) -> Tensor:  # fmt: skip
    """float x ``[..., in]`` times a weight from ``prepack_lut``, as its first ``num_planes`` planes and their table
    have it -> ``[..., out]``.

    x and the values of the table are rounded to bfloat16; products are exact, sums float32.
    """
    return _lut_linear(x, plane_tiles, table_tiles, out_features, bias, num_planes)


def prepack_lut(planes: Tensor, tables: Tensor) -> LutTiles:
    """uint8 ``[B, out, in / 8]``, float16 ``[out, values]`` -> plane_tiles, table_tiles. TypeError for another dtype,
    ValueError for shapes that are no weight of lookup-table planes."""
    layout = tiles_cuda if serves(planes) else tiles
    return LutTiles(*layout.pack(planes, tables))


def unprepack_lut(plane_tiles: Tensor, table_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``prepack_lut``, bit for bit."""
    layout = tiles_cuda if tiles_cuda.is_packed(plane_tiles) else tiles
    return layout.unpack(plane_tiles, table_tiles, out_features)


def on_cpu_order(plane_tiles: Tensor, table_tiles: Tensor, out_features: int) -> LutTiles:
    """A weight from ``prepack_lut`` in the tiles of the CPU."""
    if not tiles_cuda.is_packed(plane_tiles):
        return LutTiles(plane_tiles, table_tiles)
    return LutTiles(*tiles.pack(*tiles_cuda.unpack(plane_tiles, table_tiles, out_features)))


def lut_fits_device(plane_tiles: Tensor) -> bool:
    """Whether the tiles are those of their device."""
    return tiles_cuda.is_packed(plane_tiles) == serves(plane_tiles)
