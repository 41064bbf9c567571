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

Beyond the last output or input stand weights of 0. kernels_ext/cuda/linear/linear_formats.cuh reads this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..formats.mxfp4 import BLOCK
from ..formats.packing import pack_nibbles, unpack_nibbles
from .operator import Operands

PAIR_OUTPUTS = PAIR_INPUTS = 128
CODE_BYTES = 64 * 128 // 2  # of a tile
SHAPE_ONLY = 16  # the last axis of tensors without elements: that of the tiles of the CPU
_CHUNK = 1 << 22  # codes in flight on the CPU, 4 times as many on a GPU, whose launches cost more than memory


def pair_bytes(group_size: int, zeros: bool = False, mxfp4: bool = False) -> int:
    """Bytes of two tiles."""
    return 2 * CODE_BYTES + PAIR_OUTPUTS * (PAIR_INPUTS // group_size) * (1 if mxfp4 else 3 if zeros else 2)


def is_packed(tiles: Tensor) -> bool:
    """Whether a weight is in these tiles, not in those of the CPU, whose pieces are 256 bytes."""
    return tiles.ndim == 3 and tiles.shape[2] >= 2 * CODE_BYTES


def exponents_in_pairs(scale: Tensor, bias: int, unshifted: int, beyond: int) -> tuple[Tensor, Tensor]:
    """Scale bytes ``[out, in / 32]`` -> those of each tile ``[pairs, chunks, 2, n]``, plus bias - shift, and the shift
    in a tensor ``[1, in / 32, 4]``: as far as the largest byte is above ``unshifted``. beyond: the byte of
    no weight."""
    largest = scale.amax() if scale.numel() else scale.new_tensor(0)
    shift = (largest.int() - unshifted).clamp_min(0)
    exponents = (scale.int() + (bias - shift)).to(torch.uint8)
    places = in_pairs(exponents, PAIR_INPUTS // BLOCK, beyond).unflatten(-1, (2, 2))  # [p m w h r c, pair, of pair]
    scales = places.permute(0, 5, 1, 2, 4, 6, 3, 7).flatten(3)
    return scales, shift.repeat(scale.shape[1]).view(torch.uint8).view(1, -1, 4)


def exponents_of_pairs(tiles: Tensor, shifts: Tensor, out_features: int, bias: int) -> Tensor:
    """The inverse, of whole tiles: ``[out, in / 32]``."""
    blocks, shift = shifts.shape[1], shifts.reshape(-1)[:4].view(torch.int32)
    scales = behind_codes(tiles).unflatten(-1, (4, 8, 2, 2, 2))  # [p, c, m, w, r, pair, h, of pair]
    exponents = scales.permute(0, 2, 3, 6, 4, 1, 5, 7).reshape(-1, tiles.shape[1] * PAIR_INPUTS // BLOCK)
    return (exponents[:out_features, :blocks].int() - (bias - shift)).to(torch.uint8)


def pack_codes(packed: Tensor, rest: Tensor, spread: Callable[[Tensor, int], Tensor], unused: int) -> Tensor:
    """Codes in tiles, ``rest`` uint8 ``[pairs, chunks, 2, n]`` behind those of each. spread: the codes of a register
    (0 to 3) -> their bits of a half word; unused: the code beyond the last output or input."""
    pairs, chunks, _, size = rest.shape
    tiles = packed.new_empty(pairs, chunks, 2, CODE_BYTES + size)
    tiles[..., CODE_BYTES:] = rest
    step = pairs_at_once(packed, chunks)
    for first in range(0, pairs, step):
        codes = unpack_nibbles(packed[first * PAIR_OUTPUTS : (first + step) * PAIR_OUTPUTS])
        codes = in_pairs(codes, PAIR_INPUTS, unused).unflatten(-1, (2, 4, 2, 4, 2))  # [p m w h r c f s t q e]
        registers = codes.permute(0, 5, 1, 2, 6, 4, 9, 7, 10, 8, 3).flatten(-2).int().unbind(-1)  # h + 2 t
        halves = sum(spread(register, i) for i, register in enumerate(registers))
        tiles[first : first + step, ..., :CODE_BYTES] = halves.to(torch.int16).view(torch.uint8).flatten(3)
    return tiles.flatten(2)


def unpack_codes(
    tiles: Tensor, out_features: int, in_features: int, gather: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """uint8 ``[out, in / 2]``; gather: the inverse of ``spread``."""
    pairs, chunks, size = tiles.shape
    packed = tiles.new_empty(pairs * PAIR_OUTPUTS, in_features // 2)
    step = pairs_at_once(tiles, chunks)
    for first in range(0, pairs, step):
        words = tiles[first : first + step].unflatten(-1, (2, size // 2))[..., :CODE_BYTES].contiguous()
        halves = words.view(torch.int16).int().unflatten(-1, (4, 2, 8, 4, 4, 2))  # [p c m w f r q s e]
        codes = torch.stack([gather(halves, i) for i in range(4)], -1).to(torch.uint8).unflatten(-1, (2, 2))
        rows = codes.permute(0, 2, 3, 10, 5, 1, 4, 7, 9, 6, 8).reshape(-1, chunks * PAIR_INPUTS)[:, :in_features]
        packed[first * PAIR_OUTPUTS : first * PAIR_OUTPUTS + len(rows)] = pack_nibbles(rows)
    return packed if len(packed) == out_features else packed[:out_features].clone()


def pairs_at_once(tensor: Tensor, chunks: int) -> int:
    return max(1, (4 * _CHUNK if tensor.is_cuda else _CHUNK) // (PAIR_OUTPUTS * PAIR_INPUTS * max(chunks, 1)))


def in_pairs(rows: Tensor, columns: int, beyond: int) -> Tensor:
    """``[out, n]`` -> ``[pair, m, w, h, r, chunk, columns]``, the value ``beyond`` where outputs or columns are
    missing."""
    missing = (0, -rows.shape[1] % columns, 0, -rows.shape[0] % PAIR_OUTPUTS)
    padded = torch.nn.functional.pad(rows, missing, value=beyond)
    return padded.view(-1, 2, 4, 2, 8, padded.shape[1] // columns, columns)


def behind_codes(tiles: Tensor) -> Tensor:
    """What stands behind the codes of each tile: ``[pairs, chunks, 2, n]``."""
    return tiles.unflatten(-1, (2, tiles.shape[2] // 2))[..., CODE_BYTES:]


def num_pairs(out_features: int, in_features: int) -> tuple[int, int]:
    """Pairs of tiles that outputs fill, chunks that inputs do; the last of either may be short."""
    return -(-out_features // PAIR_OUTPUTS), -(-in_features // PAIR_INPUTS)


def check_pairs(given: Operands, group_size: int, bytes_of_pair: int) -> int:
    """in_features of an op's weight_tiles, which the shape of scale_tiles tells."""
    given.require_dtype("weight_tiles", torch.uint8)
    if given.scale_tiles.ndim != 3:
        raise ValueError(
            f"{given.op}: scale_tiles has shape {list(given.scale_tiles.shape)}, expected 3 axes from prepack"
        )
    tiles, in_features = given.weight_tiles, given.scale_tiles.shape[1] * group_size
    expected = [*num_pairs(max(given.out_features, 0), in_features), bytes_of_pair]
    if given.out_features < 0 or list(tiles.shape) != expected:
        raise ValueError(
            f"{given.op}: weight_tiles has shape {list(tiles.shape)}, expected {expected} from prepack on a GPU for "
            f"out_features = {given.out_features}, in_features = {in_features}, groups of {group_size}"
        )
    given.require_contiguous("weight_tiles")
    return in_features
