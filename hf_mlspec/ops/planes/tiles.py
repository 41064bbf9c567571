"""In which order do the CPU's kernels read a weight of bit-planes? A permutation of what is on disk; nothing is lost.

    on disk    weight_planes [B, out, in / 8], weight_scale [out, in / group]
    in tiles   plane_tiles [B, T, in / 32, 64], scale_tiles [T, in / group, 16] as ../tiles.py has them for int4;
               T = ceil(out / 16)

64 bytes are one bit of 16 outputs x 32 elements: sixteen 32-bit words, little-endian, one of each output.

    bit P of a word = element 2 P        bit 16 + P = element 2 P + 1        (P: 0 ... 15)

So the 16-bit halves of a register are two neighbours of 16 outputs, as vdpbf16ps and the rows of an AMX tile take
them. Two exchanges of bits between four planes make nibbles, and shifts bring every nibble to the low bits of its
half, where vpermw looks it up. Outputs beyond the last are zero bits with zero scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.int4 import GROUP_SIZES
from ...formats.mxfp4 import BLOCK
from ..tiles import TILE_OUTPUTS, num_tiles, padded, tile_columns, tiles_at_a_time, untile_columns

PLANE_BYTES = TILE_OUTPUTS * BLOCK // 8  # of one plane, in a step of a tile
MAX_PLANES = 8


def pack(planes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[B, out, in / 8]`` and float16 ``[out, in / group]`` -> plane_tiles, scale_tiles (above).

    TypeError for another dtype, ValueError for shapes that are no weight of bit-planes.
    """
    _require(planes, scale)
    num_planes, out, bytes_in = planes.shape
    tiles = planes.new_empty(num_planes, num_tiles(out), bytes_in * 8 // BLOCK, PLANE_BYTES)
    step = tiles_at_a_time(bytes_in // BLOCK)
    for plane, to in zip(planes, tiles, strict=True):
        for first in range(0, len(to), step):
            rows = padded(plane[first * TILE_OUTPUTS : (first + step) * TILE_OUTPUTS])
            words = _split_pairs(rows.view(-1, TILE_OUTPUTS, bytes_in * 8 // BLOCK, 4))  # [tile, r, b, byte]
            to[first : first + step] = words.transpose(1, 2).flatten(2)
    return tiles, tile_columns(scale)


def unpack(plane_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``pack``, bit for bit. ValueError for shapes that are no tiles of ``out_features`` outputs."""
    _require_tiles(plane_tiles, scale_tiles, out_features)
    num_planes, count, blocks, _ = plane_tiles.shape
    planes = plane_tiles.new_empty(num_planes, out_features, blocks * BLOCK // 8)
    step = tiles_at_a_time(blocks // 8)
    for tiles, to in zip(plane_tiles, planes, strict=True):
        for first in range(0, count, step):
            words = tiles[first : first + step].view(-1, blocks, TILE_OUTPUTS, 4).transpose(1, 2)
            rows = _join_pairs(words).reshape(-1, blocks * BLOCK // 8)
            to[first * TILE_OUTPUTS : (first + step) * TILE_OUTPUTS] = rows[: out_features - first * TILE_OUTPUTS]
    return planes, untile_columns(scale_tiles, out_features)


def _split_pairs(words: Tensor) -> Tensor:
    """Four bytes of 32 elements in order -> two with the even and two with the odd ones."""
    halves = torch.stack([_even_bits(words), _even_bits(words >> 1)], -2).unflatten(-1, (2, 2))  # [.., half, byte, 2]
    return (halves[..., 0] | halves[..., 1] << 4).flatten(-2)


def _join_pairs(words: Tensor) -> Tensor:
    halves = torch.stack([words & 15, words >> 4], -1).unflatten(-2, (2, 2)).flatten(-2)  # [.., half, 4 nibbles]
    return _spread(halves[..., 0, :]) | _spread(halves[..., 1, :]) << 1


def _even_bits(values: Tensor) -> Tensor:
    values = values & 0x55
    values = (values | values >> 1) & 0x33
    return (values | values >> 2) & 0x0F


def _spread(nibbles: Tensor) -> Tensor:
    nibbles = (nibbles | nibbles << 2) & 0x33
    return (nibbles | nibbles << 1) & 0x55


def _require(planes: Tensor, scale: Tensor) -> None:
    for name, tensor, dtype in (("weight_planes", planes, torch.uint8), ("weight_scale", scale, torch.float16)):
        if tensor.dtype != dtype:
            raise TypeError(f"prepack_planes: {name} is {tensor.dtype}, expected {dtype}")
    fits = planes.ndim == 3 and scale.ndim == 2 and 1 <= len(planes) <= MAX_PLANES
    fits = fits and planes.shape[1] == len(scale) and planes.shape[2] * 8 % BLOCK == 0
    if not fits or not _divides(planes.shape[2] * 8, scale.shape[1]):
        raise ValueError(
            f"prepack_planes: weight_planes {list(planes.shape)} and weight_scale {list(scale.shape)} are not "
            f"[1 to {MAX_PLANES}, out, in / 8] and [out, in / group] with a group of {GROUP_SIZES} that divides in"
        )


def _require_tiles(tiles: Tensor, scale: Tensor, out_features: int) -> None:
    fits = tiles.ndim == 4 and scale.ndim == 3 and tiles.shape[3] == PLANE_BYTES and scale.shape[2] == TILE_OUTPUTS
    if not fits or not tiles.shape[1] == scale.shape[0] == num_tiles(out_features):
        raise ValueError(
            f"unprepack_planes: plane_tiles {list(tiles.shape)} and scale_tiles {list(scale.shape)} are not the tiles "
            f"of {out_features} outputs, [planes, {num_tiles(out_features)}, in / {BLOCK}, {PLANE_BYTES}] and "
            f"[{num_tiles(out_features)}, in / group, {TILE_OUTPUTS}]"
        )


def _divides(in_features: int, groups: int) -> bool:
    return any(groups * group == in_features for group in GROUP_SIZES)
