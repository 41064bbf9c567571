"""In which order do the kernels read a 4-bit weight? A permutation of what is on disk; nothing is rounded or lost.

On a GPU that compiled kernels serve: as in tiles_cuda.py. Everywhere else, in plain torch, too:

    on disk    weight_packed [out, in / 2]      byte (o, i) = code 2i of row o | code 2i + 1 << 4
    in tiles   weight_tiles [ceil(out / 16), in / 32, 256]: a tile is 16 outputs, a step of it one block of 32 elements

    byte 64 j + 4 r + i of step b of tile t (j, i: 0..3, r: 0..15), output o = 16 t + r:
        low nibble = element 32 b + 8 j + i of row o        high nibble = element 32 b + 8 j + 4 + i of row o

Scales and zero points [out, in / group] become [ceil(out / 16), in / group, 16]. Outputs beyond the last are zero
bytes. 64 bytes hold 4 elements of 16 outputs in their low and 4 in their high nibbles: two operands of a dot product
instruction whose lanes are outputs (kernels_ext/cpu/kernels.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.mxfp4 import BLOCK
from ..formats.packing import pack_nibbles, unpack_nibbles
from . import tiles_cuda
from .cuda_library import serves

TILE_OUTPUTS = 16
TILE_BYTES = TILE_OUTPUTS * BLOCK // 2
_CHUNK = 1 << 22  # codes in flight: bounds the temporaries, whatever the tensor's size


def prepack_mxfp4(weight_packed: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[out, in / 2]`` and ``[out, in / 32]`` -> weight_tiles, scale_tiles (above).

    TypeError for another dtype, ValueError for shapes that are no MXFP4 weight, and on a GPU for NaN scales.
    """
    _require(weight_packed, weight_scale, BLOCK)
    if serves(weight_packed):
        return tiles_cuda.pack_mxfp4(weight_packed, weight_scale)
    return _tile_codes(weight_packed), _tile_columns(weight_scale)


def unprepack_mxfp4(weight_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``prepack_mxfp4``, bit for bit."""
    if tiles_cuda.is_packed(weight_tiles):
        return tiles_cuda.unpack_mxfp4(weight_tiles, scale_tiles, out_features)
    _require_tiles(weight_tiles, scale_tiles, out_features)
    return _untile_codes(weight_tiles, out_features), _untile_columns(scale_tiles, out_features)


def prepack_int4(
    weight_packed: Tensor, weight_scale: Tensor, weight_zero: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """uint8 ``[out, in / 2]``, float16 ``[out, in / group]``, uint8 of that shape or None -> weight_tiles,
    scale_tiles, zero_tiles. TypeError and ValueError as ``prepack_mxfp4``."""
    _require(weight_packed, weight_scale, None)
    if serves(weight_packed):
        return tiles_cuda.pack_int4(weight_packed, weight_scale, weight_zero)
    zero = None if weight_zero is None else _tile_columns(weight_zero)
    return _tile_codes(weight_packed), _tile_columns(weight_scale), zero


def unprepack_int4(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of ``prepack_int4``, bit for bit."""
    if tiles_cuda.is_packed(weight_tiles):
        return tiles_cuda.unpack_int4(weight_tiles, scale_tiles, zero_tiles, out_features)
    _require_tiles(weight_tiles, scale_tiles, out_features)
    zero = None if zero_tiles is None else _untile_columns(zero_tiles, out_features)
    return _untile_codes(weight_tiles, out_features), _untile_columns(scale_tiles, out_features), zero


def fit_device(weight_tiles: Tensor) -> bool:
    """Whether a weight is in the tiles that ops on its device read."""
    return tiles_cuda.is_packed(weight_tiles) == serves(weight_tiles)


def int4_group_size(weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None) -> int:
    """Elements that share a scale, 32, 64 or 128, of a weight from ``prepack_int4``."""
    if tiles_cuda.is_packed(weight_tiles):
        return tiles_cuda.int4_group_size(weight_tiles, zero_tiles is not None)
    return weight_tiles.shape[1] * BLOCK // max(scale_tiles.shape[1], 1)


def mxfp4_on_cpu_order(weight_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """An MXFP4 weight from ``prepack_mxfp4`` in the tiles of the CPU, which can be cut at 16 outputs."""
    if not tiles_cuda.is_packed(weight_tiles):
        return weight_tiles, scale_tiles
    packed, scale = tiles_cuda.unpack_mxfp4(weight_tiles, scale_tiles, out_features)
    return _tile_codes(packed), _tile_columns(scale)


def int4_on_cpu_order(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same of an int4 weight."""
    if not tiles_cuda.is_packed(weight_tiles):
        return weight_tiles, scale_tiles, zero_tiles
    packed, scale, zero = tiles_cuda.unpack_int4(weight_tiles, scale_tiles, zero_tiles, out_features)
    return _tile_codes(packed), _tile_columns(scale), None if zero is None else _tile_columns(zero)


def num_tiles(out_features: int) -> int:
    """Tiles that ``out_features`` outputs fill, the last of which may be short."""
    return -(-out_features // TILE_OUTPUTS)


def _tile_codes(packed: Tensor) -> Tensor:
    out, half = packed.shape
    blocks = half * 2 // BLOCK
    tiles = packed.new_zeros(num_tiles(out), blocks, TILE_BYTES)
    step = max(1, _CHUNK // (TILE_OUTPUTS * BLOCK * max(blocks, 1)))  # tiles at a time
    for first in range(0, tiles.shape[0], step):
        rows = packed[first * TILE_OUTPUTS : (first + step) * TILE_OUTPUTS]
        codes = unpack_nibbles(_padded(rows))
        codes = codes.view(-1, TILE_OUTPUTS, blocks, 4, 2, 4)  # [tile, r, b, j, nibble, i]
        codes = codes.permute(0, 2, 3, 1, 5, 4)  # [tile, b, j, r, i, nibble]
        tiles[first : first + step] = pack_nibbles(codes.flatten(2))
    return tiles


def _untile_codes(tiles: Tensor, out_features: int) -> Tensor:
    count, blocks, _ = tiles.shape
    packed = tiles.new_empty(count * TILE_OUTPUTS, blocks * BLOCK // 2)
    step = max(1, _CHUNK // (TILE_OUTPUTS * BLOCK * max(blocks, 1)))
    for first in range(0, count, step):
        part = tiles[first : first + step]
        codes = unpack_nibbles(part).view(len(part), blocks, 4, TILE_OUTPUTS, 4, 2)
        codes = codes.permute(0, 3, 1, 2, 5, 4)  # [tile, r, b, j, nibble, i]
        rows = codes.reshape(len(part) * TILE_OUTPUTS, blocks * BLOCK)
        packed[first * TILE_OUTPUTS : first * TILE_OUTPUTS + rows.shape[0]] = pack_nibbles(rows)
    return packed if len(packed) == out_features else packed[:out_features].clone()


def _tile_columns(values: Tensor) -> Tensor:
    rows = _padded(values)
    return rows.view(-1, TILE_OUTPUTS, values.shape[1]).transpose(1, 2).contiguous()


def _untile_columns(tiles: Tensor, out_features: int) -> Tensor:
    rows = tiles.transpose(1, 2).contiguous().flatten(0, 1)
    return rows if len(rows) == out_features else rows[:out_features].clone()


def _padded(rows: Tensor) -> Tensor:
    """Contiguous, and whole tiles: zeros where outputs are missing."""
    missing = -rows.shape[0] % TILE_OUTPUTS
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows.contiguous()


def _require(packed: Tensor, scale: Tensor, group: int | None) -> None:
    if packed.dtype != torch.uint8:
        raise TypeError(f"prepack: weight_packed is {packed.dtype}, expected torch.uint8")
    fits = packed.ndim == scale.ndim == 2 and packed.shape[0] == scale.shape[0] and packed.shape[1] * 2 % BLOCK == 0
    if fits and group is not None:
        fits = scale.shape[1] * group == packed.shape[1] * 2
    if not fits:
        raise ValueError(
            f"prepack: weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)} are not [out, in / 2] "
            f"and [out, in / {group or 'group'}] with in a multiple of {BLOCK}"
        )


def _require_tiles(tiles: Tensor, scale: Tensor, out_features: int) -> None:
    fits = tiles.ndim == scale.ndim == 3 and tiles.shape[2] == TILE_BYTES and scale.shape[2] == TILE_OUTPUTS
    if not fits or not tiles.shape[0] == scale.shape[0] == num_tiles(out_features):
        raise ValueError(
            f"unprepack: weight_tiles {list(tiles.shape)} and scale_tiles {list(scale.shape)} are not the tiles of "
            f"{out_features} outputs, [{num_tiles(out_features)}, in / 32, {TILE_BYTES}] and "
            f"[{num_tiles(out_features)}, in / group, {TILE_OUTPUTS}]"
        )
