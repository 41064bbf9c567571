"""In which order do the CUDA kernels read a weight of bit-planes? A permutation of what is on disk; nothing is lost.

    plane_tiles   uint8 [ceil(out / 128), ceil(in / 128), bytes]: two tiles of 64 outputs x 128 inputs, each its scales
                  and then its planes, 1024 bytes apiece, the most significant first: b planes are the front of a tile
    scale_tiles   float16 [0, in / group, 16]: nothing but its shape

Output 16 w + 8 h + r and input 64 f + 16 s + 8 t + 2 q + e of a tile (w, s, q: 0..3; r: 0..7; h, f, t, e: 0, 1) are
half e of register h + 2 t that lane 4 r + q of warp w multiplies in step s of half tile f, as in ../tiles_cuda.py.

    scales        [w][r][group][h] float16
    plane p       [w][r][q][f] words of 32 bits: bit (16 e + 8 t + 4 h + s - p) mod 32, so that the bits of one code
                  lie side by side once words of several planes are put together

Beyond the last output or input stand scales of 0. kernels_ext/cuda/planes/planes_linear_format.cuh reads this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.planes import GROUP_SIZES, MAX_PLANES
from ..tiles_cuda import PAIR_INPUTS, PAIR_OUTPUTS, SHAPE_ONLY, in_pairs, num_pairs, pairs_at_once

PLANE_BYTES = 64 * 128 // 8  # of a tile
_AXES = "pmwhrcfstqe"  # of the bits of a plane, row by row
_ORDER = "eths"  # of the bits of a word, the highest first


def is_packed(plane_tiles: Tensor) -> bool:
    """Whether a weight is in these tiles, not in those of the CPU, which have an axis of planes."""
    return plane_tiles.ndim == 3


def stored_planes(plane_tiles: Tensor) -> int:
    """Planes of a weight in these tiles: what is left of a pair of tiles are its scales."""
    return plane_tiles.shape[2] // (2 * PLANE_BYTES)


def plane_bytes(plane_tiles: Tensor) -> int:
    """Of a plane of a weight, in all tiles."""
    return plane_tiles.shape[0] * plane_tiles.shape[1] * 2 * PLANE_BYTES


def joined(plane_tiles: Tensor, planes: Tensor) -> Tensor:
    """Tiles with more planes behind their own: uint8 ``[planes, bytes of one]``, each in the order of the tiles."""
    pairs, chunks, size = plane_tiles.shape
    halves = plane_tiles.unflatten(2, (2, size // 2))
    more = planes.view(len(planes), pairs, chunks, 2, PLANE_BYTES).permute(1, 2, 3, 0, 4).flatten(3)
    return torch.cat([halves, more], dim=3).flatten(2)


def pair_bytes(num_planes: int, group_size: int) -> int:
    """Bytes of two tiles."""
    return PAIR_OUTPUTS * (PAIR_INPUTS // group_size) * 2 + 2 * num_planes * PLANE_BYTES


def shapes(out_features: int, in_features: int, num_planes: int, group_size: int) -> tuple[list[int], list[int]]:
    """Of plane_tiles and scale_tiles."""
    plane_tiles = [*num_pairs(out_features, in_features), pair_bytes(num_planes, group_size)]
    return plane_tiles, [0, in_features // group_size, SHAPE_ONLY]


def in_features(plane_tiles: Tensor, scale_tiles: Tensor, group_size: int) -> int:
    """Of a weight in these tiles."""
    if scale_tiles.ndim != 3:
        raise ValueError(f"scale_tiles has shape {list(scale_tiles.shape)}, expected 3 axes from prepack_planes")
    return scale_tiles.shape[1] * group_size


def group_size(plane_tiles: Tensor) -> int:
    """Elements that share a scale; 0 where these are tiles of no group size."""
    stored = stored_planes(plane_tiles)
    sizes = [size for size in GROUP_SIZES if plane_tiles.shape[2] == pair_bytes(stored, size)]
    return sizes[0] if sizes and 1 <= stored <= MAX_PLANES else 0


def pack(planes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[B, out, in / 8]`` and float16 ``[out, in / group]`` -> plane_tiles, scale_tiles (above).

    TypeError for another dtype, ValueError for shapes that are no weight of bit-planes.
    """
    group = _group_of(planes, scale)
    groups = PAIR_INPUTS // group
    scales = in_pairs(scale.view(torch.int16), groups, 0).permute(0, 5, 1, 2, 4, 6, 3)  # [p, c, m, w, r, group, h]
    pairs, chunks = scales.shape[:2]
    tiles = planes.new_empty(pairs, chunks, 2, pair_bytes(len(planes), group) // 2)
    front = tiles.shape[3] - len(planes) * PLANE_BYTES
    tiles[..., :front] = scales.flatten().view(torch.uint8).view(pairs, chunks, 2, front)
    for number, plane in enumerate(planes):
        to = tiles[..., front + number * PLANE_BYTES : front + (number + 1) * PLANE_BYTES]
        step = pairs_at_once(planes, chunks)
        for first in range(0, pairs, step):
            rows = plane[first * PAIR_OUTPUTS : (first + step) * PAIR_OUTPUTS]
            to[first : first + step] = to_words(in_pairs(rows, PAIR_INPUTS // 8, 0), number, _ORDER)
    return tiles.flatten(2), scale.new_empty(0, scale.shape[1], SHAPE_ONLY)


def unpack(plane_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``pack``, bit for bit. ValueError for shapes that are no tiles of ``out_features`` outputs."""
    group = _group_of_tiles(plane_tiles, scale_tiles, out_features)
    pairs, chunks, _ = plane_tiles.shape
    groups, columns = PAIR_INPUTS // group, scale_tiles.shape[1]
    tiles = plane_tiles.unflatten(2, (2, plane_tiles.shape[2] // 2))
    front = tiles.shape[3] - stored_planes(plane_tiles) * PLANE_BYTES
    places = tiles[..., :front].contiguous().view(torch.float16).unflatten(-1, (4, 8, groups, 2))  # [p c m w r g h]
    rows = places.permute(0, 2, 3, 6, 4, 1, 5).reshape(pairs * PAIR_OUTPUTS, chunks * groups)
    scale = rows[:out_features, :columns].contiguous()
    planes = plane_tiles.new_empty(stored_planes(plane_tiles), out_features, columns * group // 8)
    step = pairs_at_once(plane_tiles, chunks)
    for number, to in enumerate(planes):
        words = tiles[..., front + number * PLANE_BYTES : front + (number + 1) * PLANE_BYTES]
        for first in range(0, pairs, step):
            rows = from_words(words[first : first + step], number, _ORDER)[: out_features - first * PAIR_OUTPUTS]
            to[first * PAIR_OUTPUTS : first * PAIR_OUTPUTS + len(rows)] = rows[:, : to.shape[1]]
    return planes, scale


def to_words(rows: Tensor, plane: int, order: str) -> Tensor:
    """Bytes of 8 inputs ``[p, m, w, h, r, c, 16]`` -> a plane of tiles ``[p, c, m, 1024]``.

    order: of the bits of a word before they are moved by ``plane``, the highest digit of their place first: a
    permutation of e, t, h and s, which is last.
    """
    octets = rows.unflatten(-1, (2, 4, 2, 1))  # [p m w h r c f s t 1]
    bits = (octets >> _shifts(8, rows) & 1).unflatten(-1, (4, 2))  # [p m w h r c f s t q e]
    places = [_AXES.index(axis) for axis in "pcmwrqf" + order]
    byte_of_word = bits.permute(places).flatten(-2)  # [p c m w r q f, two axes of the order, the others]
    words = (byte_of_word << _shifts(8, rows)).sum(-1, dtype=torch.uint8).flatten(-2).view(torch.int32)
    return _rotated_right(words, plane).view(torch.uint8).flatten(3)


def from_words(words: Tensor, plane: int, order: str) -> Tensor:
    """The inverse: ``[p, c, m, 1024]`` -> bytes of 8 inputs ``[p * 128, c * 16]``."""
    natural = _rotated_right(words.contiguous().view(torch.int32), -plane % 32).view(torch.uint8)
    octets = natural.unflatten(-1, (4, 8, 4, 2, 2, 2, 1))  # [p c m w r q f, two axes of the order, 1]
    bits = (octets >> _shifts(8, words) & 1).unflatten(-1, (2, 4))  # [p c m w r q f, the order]
    held = "pcmwrqf" + order
    byte_of_row = bits.permute([held.index(axis) for axis in _AXES]).flatten(-2)  # [p m w h r c f s t, q e]
    rows = (byte_of_row << _shifts(8, words)).sum(-1, dtype=torch.uint8)
    return rows.reshape(len(words) * PAIR_OUTPUTS, -1)


def _shifts(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)


def _rotated_right(words: Tensor, by: int) -> Tensor:
    """int32, its bits moved from place k to place (k - by) mod 32."""
    if by == 0:
        return words
    return words >> by & (1 << 32 - by) - 1 | words << 32 - by


def _group_of(planes: Tensor, scale: Tensor) -> int:
    for name, tensor, dtype in (("weight_planes", planes, torch.uint8), ("weight_scale", scale, torch.float16)):
        if tensor.dtype != dtype:
            raise TypeError(f"prepack_planes: {name} is {tensor.dtype}, expected {dtype}")
    if planes.ndim == 3 and scale.ndim == 2 and 1 <= len(planes) <= MAX_PLANES and planes.shape[1] == len(scale):
        for size in GROUP_SIZES:
            if scale.shape[1] * size == planes.shape[2] * 8:
                return size
    raise ValueError(
        f"prepack_planes: weight_planes {list(planes.shape)} and weight_scale {list(scale.shape)} are not "
        f"[1 to {MAX_PLANES}, out, in / 8] and [out, in / group] with a group of {GROUP_SIZES} that divides in"
    )


def _group_of_tiles(tiles: Tensor, scale: Tensor, out_features: int) -> int:
    size = group_size(tiles) if tiles.ndim == scale.ndim == 3 else 0
    pairs = -(-out_features // PAIR_OUTPUTS)
    if size and tiles.shape[:2] == (pairs, -(-scale.shape[1] * size // PAIR_INPUTS)):
        return size
    raise ValueError(
        f"unprepack_planes: plane_tiles {list(tiles.shape)} and scale_tiles {list(scale.shape)} are not the tiles of "
        f"{out_features} outputs, [{pairs}, in / {PAIR_INPUTS}, bytes of 1 to {MAX_PLANES} planes and their scales] "
        "and [0, in / group, 16]"
    )
