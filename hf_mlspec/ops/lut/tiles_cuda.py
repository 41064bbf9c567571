"""In which order do the CUDA kernels read lookup-table planes? A permutation of what is on disk; nothing is lost.

    plane_tiles   uint8 [ceil(out / 128), ceil(in / 128), bytes]: two tiles of 64 outputs x 128 inputs, each its
                  planes, 1024 bytes apiece, the most significant first: b planes are the front of a tile. Behind them
                  stand 16 bytes for each block of 32 inputs that the last tile lacks: so the shape tells ``in``
    table_tiles   float16 [ceil(out / 128), 128, columns]: the tables as on disk

Output 16 w + 8 h + r and input 64 f + 16 s + 8 t + 2 q + e of a tile (w, s, q: 0..3; r: 0..7; h, f, t, e: 0, 1) are
half e of register h + 2 t that lane 4 r + q of warp w multiplies in step s of half tile f, as in ../tiles_cuda.py.

    plane p       [w][r][q][f] words of 32 bits: bit (16 h + 8 t + 4 e + s - p) mod 32, so that words of several planes
                  put together hold the codes of a row side by side

Beyond the last output or input stand codes of 0, beyond the last output tables of 0.
kernels_ext/cuda/lut/lut_linear_format.cuh reads this.
"""

from __future__ import annotations

from torch import Tensor

from ...formats.lut import least_planes_of
from ...formats.mxfp4 import BLOCK
from ..planes.tiles_cuda import PLANE_BYTES, from_words, to_words
from ..tiles_cuda import PAIR_INPUTS, PAIR_OUTPUTS, in_pairs, num_pairs, pairs_at_once
from .tiles import MAX_PLANES, require_on_disk

_PAIR_PLANE_BYTES = 2 * PLANE_BYTES
_LACKING_BYTES = 32  # of two tiles, a block of inputs
_ORDER = "htes"  # of the bits of a word, the highest first


def is_packed(plane_tiles: Tensor) -> bool:
    """Whether a weight is in these tiles, not in those of the CPU, which have an axis of planes."""
    return plane_tiles.ndim == 3


def stored_planes(plane_tiles: Tensor) -> int:
    """Planes of a weight in these tiles."""
    return plane_tiles.shape[2] // _PAIR_PLANE_BYTES


def in_features(plane_tiles: Tensor) -> int:
    """Of a weight in these tiles."""
    lacking = plane_tiles.shape[2] % _PAIR_PLANE_BYTES // _LACKING_BYTES
    return max(plane_tiles.shape[1] * PAIR_INPUTS - lacking * BLOCK, 0)


def shapes(out_features: int, in_features: int, num_planes: int, columns: int) -> tuple[list[int], list[int]]:
    """Of plane_tiles and table_tiles."""
    pairs, chunks = num_pairs(out_features, in_features)
    lacking = -in_features % PAIR_INPUTS // BLOCK
    bytes_of_pair = num_planes * _PAIR_PLANE_BYTES + lacking * _LACKING_BYTES
    return [pairs, chunks, bytes_of_pair], [pairs, PAIR_OUTPUTS, columns]


def pack(planes: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[B, out, in / 8]`` and float16 ``[out, columns]`` -> plane_tiles, table_tiles (above).

    TypeError for another dtype, ValueError for shapes that are no weight of lookup-table planes.
    """
    require_on_disk(planes, tables)
    num_planes, out, bytes_in = planes.shape
    tile_shape, table_shape = shapes(out, bytes_in * 8, num_planes, tables.shape[1])
    tiles = planes.new_zeros(tile_shape)
    pairs, chunks, size = tile_shape
    each, step = tiles.view(pairs, chunks, 2, size // 2), pairs_at_once(planes, chunks)
    for number, plane in enumerate(planes):
        to = each[..., number * PLANE_BYTES : (number + 1) * PLANE_BYTES]
        for first in range(0, pairs, step):
            rows = plane[first * PAIR_OUTPUTS : (first + step) * PAIR_OUTPUTS]
            to[first : first + step] = to_words(in_pairs(rows, PAIR_INPUTS // 8, 0), number, _ORDER)
    whole = tables.new_zeros(pairs * PAIR_OUTPUTS, tables.shape[1])
    whole[:out] = tables
    return tiles, whole.view(table_shape)


def unpack(plane_tiles: Tensor, table_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``pack``, bit for bit. ValueError for shapes that are no tiles of ``out_features`` outputs."""
    _require_tiles(plane_tiles, table_tiles, out_features)
    pairs, chunks, size = plane_tiles.shape
    each, step = plane_tiles.view(pairs, chunks, 2, size // 2), pairs_at_once(plane_tiles, chunks)
    planes = plane_tiles.new_empty(stored_planes(plane_tiles), out_features, in_features(plane_tiles) // 8)
    for number, to in enumerate(planes):
        words = each[..., number * PLANE_BYTES : (number + 1) * PLANE_BYTES]
        for first in range(0, pairs, step):
            rows = from_words(words[first : first + step], number, _ORDER)[: out_features - first * PAIR_OUTPUTS]
            to[first * PAIR_OUTPUTS : first * PAIR_OUTPUTS + len(rows)] = rows[:, : to.shape[1]]
    return planes, table_tiles.flatten(0, 1)[:out_features].clone()


def _require_tiles(tiles: Tensor, tables: Tensor, out_features: int) -> None:
    if tiles.ndim == tables.ndim == 3:
        stored, columns = stored_planes(tiles), tables.shape[2]
        expected = shapes(out_features, in_features(tiles), stored, columns)
        known = 1 <= stored <= MAX_PLANES and least_planes_of(stored, columns)
        if known and (list(tiles.shape), list(tables.shape)) == expected:
            return
    raise ValueError(
        f"unprepack_lut: plane_tiles {list(tiles.shape)} and table_tiles {list(tables.shape)} are not the tiles of "
        f"{out_features} outputs, [{num_pairs(out_features, 0)[0]}, in / {PAIR_INPUTS}, bytes of 1 to {MAX_PLANES} "
        f"planes] and [{num_pairs(out_features, 0)[0]}, {PAIR_OUTPUTS}, 2^(B+1) - 2^S]"
    )
