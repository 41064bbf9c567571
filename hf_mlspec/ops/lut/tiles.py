"""In which order do the CPU's kernels read lookup-table planes? A permutation of what is on disk; nothing is lost.

    on disk    weight_planes [B, out, in / 8], weight_tables [out, columns]
    in tiles   plane_tiles [B, T, in / 32, 64], table_tiles [T, 16, columns]; T = ceil(out / 16)

A step of a tile is four blocks of 32 inputs (the last step may have fewer, n): 64 n bytes, [16 outputs][n][4]. So
16 bytes of a plane are one output's, and a shuffle of bytes looks 16 numbers up in that output's table.

    bit q of byte j of a block = element 8 (q % 4) + 4 (q / 4) + 2 (j % 2) + j / 2

that is the bits of an element's place in the block in another order. Two exchanges of bits between four planes make
nibbles (kernels_ext/cpu/lut/lut_linear_tile.h). Outputs beyond the last are zero bits with tables of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.lut import least_planes_of
from ...formats.mxfp4 import BLOCK
from ..tiles import TILE_OUTPUTS, num_tiles, padded, tiles_at_a_time

PLANE_BYTES = TILE_OUTPUTS * BLOCK // 8  # of one plane, in a block of a tile
STEP = 4  # blocks
MAX_PLANES = 8


def pack(planes: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[B, out, in / 8]`` and float16 ``[out, columns]`` -> plane_tiles, table_tiles (above).

    TypeError for another dtype, ValueError for shapes that are no weight of lookup-table planes.
    """
    require_on_disk(planes, tables)
    num_planes, out, bytes_in = planes.shape
    blocks = bytes_in // 4
    tiles = planes.new_empty(num_planes, num_tiles(out), blocks, PLANE_BYTES)
    step = tiles_at_a_time(blocks)
    for plane, to in zip(planes, tiles, strict=True):
        for first in range(0, len(to), step):
            rows = padded(plane[first * TILE_OUTPUTS : (first + step) * TILE_OUTPUTS])
            to[first : first + step] = _in_steps(_reordered(rows).view(-1, TILE_OUTPUTS, blocks, 4))
    return tiles, padded(tables).view(-1, TILE_OUTPUTS, tables.shape[1])


def unpack(plane_tiles: Tensor, table_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``pack``, bit for bit. ValueError for shapes that are no tiles of ``out_features`` outputs."""
    _require_tiles(plane_tiles, table_tiles, out_features)
    num_planes, count, blocks, _ = plane_tiles.shape
    planes = plane_tiles.new_empty(num_planes, out_features, blocks * 4)
    step = tiles_at_a_time(blocks)
    for tiles, to in zip(plane_tiles, planes, strict=True):
        for first in range(0, count, step):
            rows = _restored(_of_steps(tiles[first : first + step]).reshape(-1, blocks * 4))
            to[first * TILE_OUTPUTS : (first + step) * TILE_OUTPUTS] = rows[: out_features - first * TILE_OUTPUTS]
    tables = table_tiles.flatten(0, 1)
    return planes, tables if len(tables) == out_features else tables[:out_features].clone()


def _in_steps(words: Tensor) -> Tensor:
    """``[T, 16, blocks, 4]`` -> ``[T, blocks, 64]``: blocks of a step behind each other in every output."""
    count, _, blocks, _ = words.shape
    whole = blocks // STEP * STEP
    steps = words[:, :, :whole].unflatten(2, (-1, STEP)).transpose(1, 2)  # [T, steps, 16, 4 blocks, 4]
    last = words[:, :, whole:].reshape(count, -1, PLANE_BYTES)
    return torch.cat([steps.reshape(count, whole, PLANE_BYTES), last], 1)


def _of_steps(tiles: Tensor) -> Tensor:
    """The inverse: ``[T, 16, blocks, 4]``."""
    count, blocks, _ = tiles.shape
    whole = blocks // STEP * STEP
    steps = tiles[:, :whole].reshape(count, whole // STEP, TILE_OUTPUTS, STEP, 4).transpose(1, 2).flatten(2, 3)
    return torch.cat([steps, tiles[:, whole:].reshape(count, TILE_OUTPUTS, -1, 4)], 2)


def _reordered(rows: Tensor) -> Tensor:
    """``[rows, in / 8]``: the bits of every four bytes in the order of a block."""
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bits = (rows.unflatten(-1, (-1, 4, 1)) >> places & 1).unflatten(-1, (2, 2, 2))  # [r, block, s, h, low, high]
    octets = bits.permute(0, 1, 5, 4, 3, 2).flatten(4).flatten(2, 3)  # [r, block, byte, h and s]
    return (octets << places).sum(-1, dtype=torch.uint8).flatten(1)


def _restored(rows: Tensor) -> Tensor:
    """The inverse."""
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bits = (rows.unflatten(-1, (-1, 4, 1)) >> places & 1).unflatten(-1, (2, 4)).unflatten(2, (2, 2))
    octets = bits.permute(0, 1, 5, 4, 3, 2).flatten(3)  # of [r, block, high, low, h, s]: [r, block, s, bit]
    return (octets << places).sum(-1, dtype=torch.uint8).flatten(1)


def require_on_disk(planes: Tensor, tables: Tensor) -> None:
    """TypeError or ValueError where these are no weight of lookup-table planes."""
    for name, tensor, dtype in (("weight_planes", planes, torch.uint8), ("weight_tables", tables, torch.float16)):
        if tensor.dtype != dtype:
            raise TypeError(f"prepack_lut: {name} is {tensor.dtype}, expected {dtype}")
    fits = planes.ndim == 3 and tables.ndim == 2 and 1 <= len(planes) <= MAX_PLANES
    fits = fits and planes.shape[1] == len(tables) and planes.shape[2] * 8 % BLOCK == 0
    if not fits or not least_planes_of(len(planes), tables.shape[1]):
        raise ValueError(
            f"prepack_lut: weight_planes {list(planes.shape)} and weight_tables {list(tables.shape)} are not [B, out, "
            f"in / 8] with B from 1 to {MAX_PLANES} and in a multiple of {BLOCK}, and [out, 2^(B+1) - 2^S]"
        )


def _require_tiles(tiles: Tensor, tables: Tensor, out_features: int) -> None:
    fits = tiles.ndim == 4 and tables.ndim == 3 and tiles.shape[3] == PLANE_BYTES and tables.shape[1] == TILE_OUTPUTS
    if not fits or not tiles.shape[1] == tables.shape[0] == num_tiles(out_features):
        raise ValueError(
            f"unprepack_lut: plane_tiles {list(tiles.shape)} and table_tiles {list(tables.shape)} are not the tiles "
            f"of {out_features} outputs, [planes, {num_tiles(out_features)}, in / {BLOCK}, {PLANE_BYTES}] and "
            f"[{num_tiles(out_features)}, {TILE_OUTPUTS}, values]"
        )
