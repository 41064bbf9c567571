"""In which order do the CPU's kernels read a 4-bit weight? A permutation of what is on disk; nothing is lost.

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

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats.mxfp4 import BLOCK
from ..formats.packing import pack_nibbles, unpack_nibbles
from . import tiles_cuda
from .cuda_library import serves
from .operator import Operands

TILE_OUTPUTS = 16
TILE_BYTES = TILE_OUTPUTS * BLOCK // 2
_CHUNK = 1 << 22  # codes in flight: bounds the temporaries, whatever the tensor's size


def fit_device(weight_tiles: Tensor) -> bool:
    """Whether a 4-bit weight is in the tiles that ops on its device read."""
    return tiles_cuda.is_packed(weight_tiles) == serves(weight_tiles)


def num_tiles(out_features: int) -> int:
    """Tiles that ``out_features`` outputs fill, the last of which may be short."""
    return -(-out_features // TILE_OUTPUTS)


def is_tiles(part: Tensor | None) -> bool:
    """Whether a part of a weight is tiles of outputs, or planes of them; what has fewer axes stands beside them."""
    return part is not None and part.ndim > 2


def cut(parts: Sequence[Tensor | None], outputs: Sequence[int]) -> list[tuple[Tensor | None, ...]] | None:
    """Weights of so many outputs, one behind the other, that are in tiles together: those of each, as views, and None
    in place of what stands beside tiles.

    None where a weight but the last does not fill its tiles, and for planes of the CPU: those of a part of the outputs
    would not be one piece.
    """
    count = len(parts[0])
    height = TILE_OUTPUTS if count == num_tiles(sum(outputs)) else tiles_cuda.PAIR_OUTPUTS
    if parts[0].ndim == 4 or any(size % height for size in outputs[:-1]):
        return None
    weights, first = [], 0
    for size in outputs:
        end = first - (-size // height)
        # A part that is not one tile a row, a shape or an exponent, belongs to all.
        views = [(part[first:end] if len(part) == count else part) if is_tiles(part) else None for part in parts]
        weights.append(tuple(views))
        first = end
    return weights


def tiles_at_a_time(blocks: int) -> int:
    return max(1, _CHUNK // (TILE_OUTPUTS * BLOCK * max(blocks, 1)))


def tile_codes(packed: Tensor) -> Tensor:
    """uint8 ``[out, in / 2]`` -> weight_tiles (above)."""
    out, half = packed.shape
    blocks = half * 2 // BLOCK
    tiles = packed.new_zeros(num_tiles(out), blocks, TILE_BYTES)
    step = tiles_at_a_time(blocks)
    for first in range(0, tiles.shape[0], step):
        rows = packed[first * TILE_OUTPUTS : (first + step) * TILE_OUTPUTS]
        codes = unpack_nibbles(padded(rows))
        codes = codes.view(-1, TILE_OUTPUTS, blocks, 4, 2, 4)  # [tile, r, b, j, nibble, i]
        codes = codes.permute(0, 2, 3, 1, 5, 4)  # [tile, b, j, r, i, nibble]
        tiles[first : first + step] = pack_nibbles(codes.flatten(2))
    return tiles


def untile_codes(tiles: Tensor, out_features: int) -> Tensor:
    """The inverse of ``tile_codes``."""
    count, blocks, _ = tiles.shape
    packed = tiles.new_empty(count * TILE_OUTPUTS, blocks * BLOCK // 2)
    step = tiles_at_a_time(blocks)
    for first in range(0, count, step):
        part = tiles[first : first + step]
        codes = unpack_nibbles(part).view(len(part), blocks, 4, TILE_OUTPUTS, 4, 2)
        codes = codes.permute(0, 3, 1, 2, 5, 4)  # [tile, r, b, j, nibble, i]
        rows = codes.reshape(len(part) * TILE_OUTPUTS, blocks * BLOCK)
        packed[first * TILE_OUTPUTS : first * TILE_OUTPUTS + rows.shape[0]] = pack_nibbles(rows)
    return packed if len(packed) == out_features else packed[:out_features].clone()


def tile_columns(values: Tensor) -> Tensor:
    """``[out, n]`` -> ``[ceil(out / 16), n, 16]``."""
    rows = padded(values)
    return rows.view(-1, TILE_OUTPUTS, values.shape[1]).transpose(1, 2).contiguous()


def untile_columns(tiles: Tensor, out_features: int) -> Tensor:
    """The inverse of ``tile_columns``."""
    rows = tiles.transpose(1, 2).contiguous().flatten(0, 1)
    return rows if len(rows) == out_features else rows[:out_features].clone()


def padded(rows: Tensor) -> Tensor:
    """Contiguous, and whole tiles: zeros where outputs are missing."""
    missing = -rows.shape[0] % TILE_OUTPUTS
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows.contiguous()


def require_on_disk(packed: Tensor, scale: Tensor, group: int | None) -> None:
    """TypeError or ValueError where these are no 4-bit weight with one scale per ``group`` (None: any) elements."""
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


def require_tiles(tiles: Tensor, scale: Tensor, out_features: int) -> None:
    """ValueError where these are not the tiles of ``out_features`` outputs."""
    fits = tiles.ndim == scale.ndim == 3 and tiles.shape[2] == TILE_BYTES and scale.shape[2] == TILE_OUTPUTS
    if not fits or not tiles.shape[0] == scale.shape[0] == num_tiles(out_features):
        raise ValueError(
            f"unprepack: weight_tiles {list(tiles.shape)} and scale_tiles {list(scale.shape)} are not the tiles of "
            f"{out_features} outputs, [{num_tiles(out_features)}, in / 32, {TILE_BYTES}] and "
            f"[{num_tiles(out_features)}, in / group, {TILE_OUTPUTS}]"
        )


def check_tiles(given: Operands) -> int:
    """in_features of an op's weight_tiles, which are found to be those of its out_features."""
    given.require_dtype("weight_tiles", torch.uint8)
    tiles = given.weight_tiles
    if tiles.ndim != 3 or tiles.shape[2] != TILE_BYTES:
        raise ValueError(
            f"{given.op}: weight_tiles has shape {list(tiles.shape)}, expected [out / 16, in / {BLOCK}, {TILE_BYTES}] "
            "from prepack"
        )
    require_count(given, "weight_tiles")
    given.require_contiguous("weight_tiles")
    return tiles.shape[1] * BLOCK


def require_count(given: Operands, name: str) -> None:
    """ValueError where the first axis of ``name`` is not the number of tiles that out_features fill."""
    count = vars(given)[name].shape[0]
    if given.out_features < 0 or num_tiles(given.out_features) != count:
        raise ValueError(
            f"{given.op}: out_features is {given.out_features}, {name} hold {count} tiles of {TILE_OUTPUTS}"
        )
