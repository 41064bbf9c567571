"""In which order do the CUDA kernels read a 4-bit weight? A permutation of what is on disk; nothing is lost.

    weight_tiles  uint8 [ceil(out / 128), ceil(in / 128), bytes]: two tiles of 64 outputs x 128 inputs, each its codes
                  (4096 bytes), its scales and its zero points; some of the pairs are a weight of fewer outputs
    scale_tiles   MXFP4 uint8 [1, in / 32, 4]: one int32, repeated so that the shape tells `in`; the product is
                  multiplied by 2 to its power. int4 float16 [0, in / group, 16]: nothing but its shape
    zero_tiles    int4 with zero points uint8 [0, in / group, 16]: nothing but its shape; else None

An operand of 16 outputs x 16 inputs is 32 lanes with 4 registers of 2 weights. Output 16 w + 8 h + r and input
64 f + 16 s + 8 t + 2 q + e of a tile are half e of register h + 2 t in lane 4 r + q (w, s, q: 0..3; r: 0..7; h, f, t,
e: 0, 1): the code stands in half e of the word [w][f][lane][s].

    half words of int4    code ^ 8 of register i at bits 4 i
    half words of MXFP4   sign of register 0 1 2 3 at bit 15 12 13 14, its three other bits from bit 6 3 0 9 on
    scales                int4 [w][r][group][h] float16, and behind them the zero points likewise;
                          MXFP4 [w][r][pair of blocks][h][block of the pair], scale byte + 126 - shift

Beyond the last output or input stand weights of 0. kernels_ext/cuda/linear_formats.cuh reads this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.int4 import GROUP_SIZES, SYMMETRIC_ZERO
from ..formats.mxfp4 import BLOCK, NAN_SCALE
from ..formats.packing import pack_nibbles, unpack_nibbles

PAIR_OUTPUTS = PAIR_INPUTS = 128
CODE_BYTES = 64 * 128 // 2  # of a tile
_SHAPE_ONLY = 16  # the last axis of tensors without elements: that of the tiles of the CPU
_SCALE_BIAS, _UNSHIFTED = 126, 128  # the largest scale byte without a shift: its exponent is that of a number
_SIGN_BITS, _OTHER_BITS = (15, 12, 13, 14), (6, 3, 0, 9)  # of register i
_CHUNK = 1 << 22  # codes in flight on the CPU, 4 times as many on a GPU, whose launches cost more than memory


def pair_bytes(group_size: int, zeros: bool = False, mxfp4: bool = False) -> int:
    """Bytes of two tiles."""
    return 2 * CODE_BYTES + PAIR_OUTPUTS * (PAIR_INPUTS // group_size) * (1 if mxfp4 else 3 if zeros else 2)


def int4_group_size(tiles: Tensor, zeros: bool) -> int:
    """Of an int4 weight; 0 where its tiles are of no group size."""
    sizes = [size for size in GROUP_SIZES if tiles.shape[2] == pair_bytes(size, zeros)]
    return sizes[0] if sizes else 0


def is_packed(tiles: Tensor) -> bool:
    """Whether a weight is in these tiles, not in those of the CPU, whose pieces are 256 bytes."""
    return tiles.ndim == 3 and tiles.shape[2] >= 2 * CODE_BYTES


def pack_mxfp4(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[out, in / 2]``, ``[out, in / 32]`` -> weight_tiles, scale_tiles. ValueError for NaN scales, which the
    kernels would read as numbers."""
    if (bad := int((scale == NAN_SCALE).sum())) > 0:
        raise ValueError(f"prepack: {bad} of {scale.numel()} scales are NaN ({NAN_SCALE}): quantize finite weights")
    largest = scale.amax() if scale.numel() else scale.new_tensor(0)
    shift = (largest.int() - _UNSHIFTED).clamp_min(0)
    exponents = (scale.int() + (_SCALE_BIAS - shift)).to(torch.uint8)
    places = _in_pairs(exponents, PAIR_INPUTS // BLOCK, 1).unflatten(-1, (2, 2))  # [p, m, w, h, r, c, pair, of pair]
    scales = places.permute(0, 5, 1, 2, 4, 6, 3, 7).flatten(3)
    return _pack(packed, scales, _spread_mxfp4, 0), shift.repeat(scale.shape[1]).view(torch.uint8).view(1, -1, 4)


def unpack_mxfp4(tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``pack_mxfp4``, bit for bit."""
    blocks, shift = scale_tiles.shape[1], scale_tiles.reshape(-1)[:4].view(torch.int32)
    scales = _behind_codes(tiles).unflatten(-1, (4, 8, 2, 2, 2))  # [p, c, m, w, r, pair, h, of pair]
    exponents = scales.permute(0, 2, 3, 6, 4, 1, 5, 7).reshape(-1, tiles.shape[1] * PAIR_INPUTS // BLOCK)
    scale = (exponents[:out_features, :blocks].int() - (_SCALE_BIAS - shift)).to(torch.uint8)
    return _unpack(tiles, out_features, blocks * BLOCK, _gather_mxfp4), scale


def pack_int4(packed: Tensor, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """uint8 ``[out, in / 2]``, float16 ``[out, in / group]``, uint8 or None -> weight_tiles, scale_tiles,
    zero_tiles."""
    groups = PAIR_INPUTS // (packed.shape[1] * 2 // max(scale.shape[1], 1))
    parts = [_in_pairs(part, groups, 0).permute(0, 5, 1, 2, 4, 6, 3).contiguous().view(torch.uint8).flatten(3)
             for part in (scale.view(torch.int16), zero) if part is not None]
    tiles = _pack(packed, torch.cat(parts, -1), _spread_int4, SYMMETRIC_ZERO if zero is None else 0)
    shape = (0, scale.shape[1], _SHAPE_ONLY)
    return tiles, scale.new_empty(shape), None if zero is None else zero.new_empty(shape)


def unpack_int4(
    tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of ``pack_int4``, bit for bit."""
    rest, columns = _behind_codes(tiles), scale_tiles.shape[1]
    count = rest.shape[-1] // (2 if zero_tiles is None else 3)  # scales of a tile
    groups = count // (PAIR_OUTPUTS // 2)

    def part(values: Tensor) -> Tensor:
        places = values.unflatten(-1, (4, 8, groups, 2)).permute(0, 2, 3, 6, 4, 1, 5)  # [p, m, w, h, r, c, group]
        return places.reshape(-1, tiles.shape[1] * groups)[:out_features, :columns].contiguous()

    scale = part(rest[..., : 2 * count].contiguous().view(torch.int16)).view(torch.float16)
    zero = None if zero_tiles is None else part(rest[..., 2 * count :])
    group_size = PAIR_INPUTS // groups
    return _unpack(tiles, out_features, columns * group_size, _gather_int4), scale, zero


def _pack(packed: Tensor, rest: Tensor, spread, unused: int) -> Tensor:
    """Codes in tiles, ``rest`` uint8 ``[pairs, chunks, 2, n]`` behind those of each."""
    pairs, chunks, _, size = rest.shape
    tiles = packed.new_empty(pairs, chunks, 2, CODE_BYTES + size)
    tiles[..., CODE_BYTES:] = rest
    step = _pairs_at_once(packed, chunks)
    for first in range(0, pairs, step):
        codes = unpack_nibbles(packed[first * PAIR_OUTPUTS : (first + step) * PAIR_OUTPUTS])
        codes = _in_pairs(codes, PAIR_INPUTS, unused).unflatten(-1, (2, 4, 2, 4, 2))  # [p m w h r c f s t q e]
        registers = codes.permute(0, 5, 1, 2, 6, 4, 9, 7, 10, 8, 3).flatten(-2).int().unbind(-1)  # h + 2 t
        halves = sum(spread(register, i) for i, register in enumerate(registers))
        tiles[first : first + step, ..., :CODE_BYTES] = halves.to(torch.int16).view(torch.uint8).flatten(3)
    return tiles.flatten(2)


def _unpack(tiles: Tensor, out_features: int, in_features: int, gather) -> Tensor:
    """uint8 ``[out, in / 2]``."""
    pairs, chunks, size = tiles.shape
    packed = tiles.new_empty(pairs * PAIR_OUTPUTS, in_features // 2)
    step = _pairs_at_once(tiles, chunks)
    for first in range(0, pairs, step):
        words = tiles[first : first + step].unflatten(-1, (2, size // 2))[..., :CODE_BYTES].contiguous()
        halves = words.view(torch.int16).int().unflatten(-1, (4, 2, 8, 4, 4, 2))  # [p c m w f r q s e]
        codes = torch.stack([gather(halves, i) for i in range(4)], -1).to(torch.uint8).unflatten(-1, (2, 2))
        rows = codes.permute(0, 2, 3, 10, 5, 1, 4, 7, 9, 6, 8).reshape(-1, chunks * PAIR_INPUTS)[:, :in_features]
        packed[first * PAIR_OUTPUTS : first * PAIR_OUTPUTS + len(rows)] = pack_nibbles(rows)
    return packed if len(packed) == out_features else packed[:out_features].clone()


def _pairs_at_once(tensor: Tensor, chunks: int) -> int:
    return max(1, (4 * _CHUNK if tensor.is_cuda else _CHUNK) // (PAIR_OUTPUTS * PAIR_INPUTS * max(chunks, 1)))


def _in_pairs(rows: Tensor, columns: int, beyond: int) -> Tensor:
    """``[out, n]`` -> ``[pair, m, w, h, r, chunk, columns]``, the value ``beyond`` where outputs or columns are
    missing."""
    missing = (0, -rows.shape[1] % columns, 0, -rows.shape[0] % PAIR_OUTPUTS)
    padded = torch.nn.functional.pad(rows, missing, value=beyond)
    return padded.view(-1, 2, 4, 2, 8, padded.shape[1] // columns, columns)


def _behind_codes(tiles: Tensor) -> Tensor:
    """What stands behind the codes of each tile: ``[pairs, chunks, 2, n]``."""
    return tiles.unflatten(-1, (2, tiles.shape[2] // 2))[..., CODE_BYTES:]


def _spread_int4(codes: Tensor, register: int) -> Tensor:
    return (codes ^ 8) << 4 * register


def _gather_int4(halves: Tensor, register: int) -> Tensor:
    return (halves >> 4 * register & 15) ^ 8


def _spread_mxfp4(codes: Tensor, register: int) -> Tensor:
    return (codes >> 3) << _SIGN_BITS[register] | (codes & 7) << _OTHER_BITS[register]


def _gather_mxfp4(halves: Tensor, register: int) -> Tensor:
    return (halves >> _SIGN_BITS[register] & 1) << 3 | (halves >> _OTHER_BITS[register] & 7)
