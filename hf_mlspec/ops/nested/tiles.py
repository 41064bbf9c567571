"""In which order do the CPU's kernels read a nested BF16 weight? A permutation of what is on disk; nothing is lost.

    on disk    weight_packed [out, in / 2], weight_scale [out, in / 32], weight_low [out, in],
               weight_high [out, in / 2]
    in tiles   draft_tiles [T, in / 32, 256] and exponent_tiles [T, in / 32, 16] as ../tiles.py has them for MXFP4,
               low_tiles [T, in / 32, 768]; T = ceil(out / 16), all uint8

The 12 bits v of a weight lie in low_tiles as 16-bit words, little-endian. Step b of tile t is [4 j][3 k][16 r][2 h] of
them; of the eight elements from 32 b + 8 j on of output 16 t + r, pair p is the two elements 2 p + h:

    bits 0 ... 11 of word (j, k, r, h) = v of pair 0, 2, 3 at k = 0, 1, 2     bits 12 ... 15 = nibble k of v of pair 1

So three registers of 64 bytes, masked and shifted, are four whose 32-bit lanes are two neighbours of 16 outputs:
operands of vdpbf16ps, and rows of an AMX tile. Outputs beyond the last are zero bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.mxfp4 import BLOCK
from ...formats.packing import pack_nibbles, unpack_nibbles
from ..tiles import (
    TILE_BYTES,
    TILE_OUTPUTS,
    num_tiles,
    padded,
    tile_codes,
    tile_columns,
    tiles_at_a_time,
    untile_codes,
    untile_columns,
)

LOW_BYTES = TILE_OUTPUTS * BLOCK * 12 // 8
_WHOLE_PAIRS = [0, 2, 3]


def pack(packed: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The four planes of a nested weight (above) -> draft_tiles, exponent_tiles, low_tiles.

    TypeError where a plane is not uint8, ValueError where their shapes are not those of one weight.
    """
    require_on_disk(packed, scale, low, high)
    return tile_codes(packed), tile_columns(scale), _tile_low(low, high)


def unpack(
    draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of ``pack``, bit for bit. ValueError for shapes that are no tiles of ``out_features`` outputs."""
    _require_tiles(draft_tiles, exponent_tiles, low_tiles, out_features)
    low, high = _untile_low(low_tiles, out_features)
    return untile_codes(draft_tiles, out_features), untile_columns(exponent_tiles, out_features), low, high


def _tile_low(low: Tensor, high: Tensor) -> Tensor:
    out, blocks = low.shape[0], low.shape[1] // BLOCK
    tiles = low.new_zeros(num_tiles(out), blocks, LOW_BYTES)
    step = tiles_at_a_time(blocks)
    for first in range(0, tiles.shape[0], step):
        rows = slice(first * TILE_OUTPUTS, (first + step) * TILE_OUTPUTS)
        fields = padded(low[rows]).to(torch.int32) | unpack_nibbles(padded(high[rows])).to(torch.int32) << 8
        fields = fields.view(-1, TILE_OUTPUTS, blocks, 4, 4, 2).permute(0, 2, 3, 4, 1, 5)  # [tile, b, j, p, r, h]
        split = torch.stack([fields[:, :, :, 1] >> 4 * k & 15 for k in range(3)], 3)
        words = fields[:, :, :, _WHOLE_PAIRS] | split << 12
        tiles[first : first + step] = torch.stack([words & 255, words >> 8], -1).to(torch.uint8).flatten(2)
    return tiles


def _untile_low(tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    count, blocks, _ = tiles.shape
    low = tiles.new_empty(count * TILE_OUTPUTS, blocks * BLOCK)
    high = tiles.new_empty(count * TILE_OUTPUTS, blocks * BLOCK // 2)
    step = tiles_at_a_time(blocks)
    for first in range(0, count, step):
        halves = tiles[first : first + step].to(torch.int32).view(-1, blocks, 4, 3, TILE_OUTPUTS, 2, 2)
        words = halves[..., 0] | halves[..., 1] << 8  # [tile, b, j, k, r, h]
        whole, split = words & 0xFFF, words >> 12
        second = split[:, :, :, 0] | split[:, :, :, 1] << 4 | split[:, :, :, 2] << 8
        fields = torch.stack([whole[:, :, :, 0], second, whole[:, :, :, 1], whole[:, :, :, 2]], 3)
        fields = fields.permute(0, 4, 1, 2, 3, 5).reshape(-1, blocks * BLOCK)
        rows = slice(first * TILE_OUTPUTS, first * TILE_OUTPUTS + fields.shape[0])
        low[rows] = (fields & 255).to(torch.uint8)
        high[rows] = pack_nibbles((fields >> 8).to(torch.uint8))
    whole_tiles = low.shape[0] == out_features
    return (low, high) if whole_tiles else (low[:out_features].clone(), high[:out_features].clone())


def require_on_disk(packed: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> None:
    """TypeError or ValueError where these are not the planes of one nested weight."""
    planes = {"weight_packed": packed, "weight_scale": scale, "weight_low": low, "weight_high": high}
    for name, plane in planes.items():
        if plane.dtype != torch.uint8:
            raise TypeError(f"prepack_nested: {name} is {plane.dtype}, expected torch.uint8")
    fits = low.ndim == 2 and low.shape[1] % BLOCK == 0
    if fits:
        out, width = low.shape
        half = (out, width // 2)
        fits = packed.shape == half and high.shape == half and scale.shape == (out, width // BLOCK)
    if not fits:
        shapes = ", ".join(f"{name} {list(plane.shape)}" for name, plane in planes.items())
        raise ValueError(
            f"prepack_nested: {shapes} are not [out, in / 2], [out, in / {BLOCK}], [out, in] and [out, in / 2] "
            f"with in a multiple of {BLOCK}"
        )


def _require_tiles(draft: Tensor, exponent: Tensor, low: Tensor, out_features: int) -> None:
    parts = (("draft_tiles", draft), ("exponent_tiles", exponent), ("low_tiles", low))
    widths = dict(zip((TILE_BYTES, TILE_OUTPUTS, LOW_BYTES), parts, strict=True))
    tiles = num_tiles(out_features)
    blocks = low.shape[1] if low.ndim == 3 else -1
    if any(tensor.shape != (tiles, blocks, width) for width, (_, tensor) in widths.items()):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in widths.values())
        wanted = ", ".join(f"[{tiles}, in / {BLOCK}, {width}]" for width in widths)
        raise ValueError(f"unprepack_nested: {shapes} are not the tiles of {out_features} outputs, {wanted}")
