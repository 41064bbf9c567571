"""What is an int4 weight to the kernels: its ops, their plain torch, and its tiles on every device (tiles.py)?"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import int4
from ..formats.int4 import GROUP_SIZES, SYMMETRIC_ZERO
from ..formats.mxfp4 import BLOCK
from ..formats.packing import unpack_nibbles
from . import tiles, tiles_cuda
from .cuda_library import serves
from .operator import REFERENCES, Operands, like_x, operator
from .products import bias_of, finish, in_slices, integer_product, rounded, tiles_of
from .tiles_cuda import PAIR_INPUTS, PAIR_OUTPUTS, SHAPE_ONLY, in_pairs


class Int4Tiles(NamedTuple):
    """On the CPU uint8 ``[ceil(out / 16), in / 32, 256]``, float16 ``[ceil(out / 16), in / group, 16]`` and uint8 of
    that shape, None for symmetric weights; on a GPU that kernels serve as tiles_cuda.py says."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None


def check_weight(given: Operands) -> int:
    """in_features. TypeError, ValueError: these are no tiles of an int4 weight."""
    given.require_choice("group_size", GROUP_SIZES)
    weight, group_size, zero = given.weight_tiles, given.group_size, given.zero_tiles
    if weight.is_cuda and tiles_cuda.is_packed(weight):
        in_features = tiles_cuda.check_pairs(given, group_size, tiles_cuda.pair_bytes(group_size, zero is not None))
        groups = [0, in_features // group_size, tiles.TILE_OUTPUTS]
    else:
        in_features = tiles.check_tiles(given)
        groups = [weight.shape[0], in_features // group_size, tiles.TILE_OUTPUTS]
    if in_features % group_size:
        raise ValueError(f"{given.op}: group_size {group_size} does not divide in_features = {in_features}")
    given.require_part("scale_tiles", torch.float16, groups)
    if zero is not None:
        given.require_part("zero_tiles", torch.uint8, groups)
    return in_features


def _check_linear(given: Operands) -> None:
    in_features = check_weight(given)
    given.require_choice("activation_bits", (4, 8, 16))
    given.require_activation_clip()
    given.require_rows(in_features, given.out_features)


@operator(_check_linear, like_x)
def _int4_linear(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int,
    bias: Tensor | None, group_size: int, activation_bits: int, activation_clip: float,
) -> Tensor:  # fmt: skip
    weight_tiles, scale_tiles, zero_tiles = on_cpu_order(weight_tiles, scale_tiles, zero_tiles, out_features)

    def part(rows: slice) -> Tensor:
        cut = tiles_of(rows)
        zero = None if zero_tiles is None else zero_tiles[cut]
        packed, scale, zero = unprepack_int4(weight_tiles[cut], scale_tiles[cut], zero, rows.stop - rows.start)
        if activation_bits == 16:
            dense = int4.dequantize(packed, scale, zero)  # float32: code x scale does not fit bfloat16
            return finish(F.linear(rounded(x), dense), bias_of(bias, rows), x.dtype)
        codes = unpack_nibbles(packed).to(torch.int8).unflatten(-1, (-1, group_size))
        codes = codes - (SYMMETRIC_ZERO if zero is None else zero.to(torch.int8).unsqueeze(-1))
        how = group_size, activation_bits, bias_of(bias, rows), activation_clip
        return integer_product(x, codes.flatten(-2), scale.double(), *how)

    return in_slices(part, out_features, x.shape[-1])


def int4_linear(
    x: Tensor,
    weight_tiles: Tensor,
    scale_tiles: Tensor,
    zero_tiles: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    *,
    group_size: int,
    activation_bits: int = 16,
    activation_clip: float = 1.0,
) -> Tensor:
    """float x ``[..., in]`` times an int4 weight from ``prepack_int4`` -> ``[..., out]``.

    group_size 32, 64 or 128: elements that share a scale. zero_tiles None: symmetric. activation_bits 16: x is rounded
    to bfloat16; 8 or 4: x is quantized in the weight's groups (QSpec's W4A4 is 4), integer dot products of a group.
    activation_clip: of 4 activation bits, .1 to 1 (formats/activations.py); with others nothing is clipped.
    """
    how = group_size, activation_bits, activation_clip
    return _int4_linear(x, weight_tiles, scale_tiles, zero_tiles, out_features, bias, *how)


def _check_sums(given: Operands) -> None:
    vars(given)["bias"] = None
    in_features = check_weight(given)
    given.require_choice("activation_bits", (4, 8, 16))
    given.require_rows(in_features, given.out_features)


@operator(
    _check_sums,
    lambda given: given.x.new_empty((*given.x.shape[:-1], given.out_features), dtype=torch.float32),
    composed_on_cpu=True,
)
def _int4_sums(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int,
    group_size: int, activation_bits: int,
) -> Tensor:  # fmt: skip
    multiply = REFERENCES["int4_linear"] if x.is_cuda else _int4_linear  # the kernel on a GPU rounds
    tiles_and_shape = weight_tiles, scale_tiles, zero_tiles, out_features
    return multiply(x.float(), *tiles_and_shape, None, group_size, activation_bits, 1.0)


def int4_sums(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int, *,
    group_size: int, activation_bits: int = 16,
) -> Tensor:  # fmt: skip
    """``int4_linear`` of x of any float dtype without the last rounding -> float32 ``[..., out]``."""
    return _int4_sums(x, weight_tiles, scale_tiles, zero_tiles, out_features, group_size, activation_bits)


@operator(check_weight, lambda given: given.weight_tiles.new_empty(
    (given.out_features, given.scale_tiles.shape[1] * given.group_size), dtype=torch.bfloat16
))  # fmt: skip
def _int4_dequantize(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int, group_size: int
) -> Tensor:
    if weight_tiles.numel() == 0:
        return weight_tiles.new_empty((out_features, scale_tiles.shape[1] * group_size), dtype=torch.bfloat16)
    return int4.dequantize(*unprepack_int4(weight_tiles, scale_tiles, zero_tiles, out_features), torch.bfloat16)


def int4_dequantize(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int, group_size: int
) -> Tensor:
    """An int4 weight from ``prepack_int4`` as bfloat16 ``[out, in]``, (code - zero) * scale rounded once, bit for bit
    that of formats/int4.dequantize: with ``bf16_linear`` what systems do that have no kernel for int4 weights times
    16-bit activations."""
    return _int4_dequantize(weight_tiles, scale_tiles, zero_tiles, out_features, group_size)


def prepack_int4(weight_packed: Tensor, weight_scale: Tensor, weight_zero: Tensor | None = None) -> Int4Tiles:
    """uint8 ``[out, in / 2]``, float16 ``[out, in / group]``, uint8 of that shape or None -> weight_tiles,
    scale_tiles, zero_tiles. TypeError and ValueError as ``prepack_mxfp4``."""
    tiles.require_on_disk(weight_packed, weight_scale, None)
    if serves(weight_packed):
        return pack_cuda(weight_packed, weight_scale, weight_zero)
    return _pack_cpu(weight_packed, weight_scale, weight_zero)


def unprepack_int4(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of ``prepack_int4``, bit for bit."""
    if tiles_cuda.is_packed(weight_tiles):
        return unpack_cuda(weight_tiles, scale_tiles, zero_tiles, out_features)
    tiles.require_tiles(weight_tiles, scale_tiles, out_features)
    zero = None if zero_tiles is None else tiles.untile_columns(zero_tiles, out_features)
    return tiles.untile_codes(weight_tiles, out_features), tiles.untile_columns(scale_tiles, out_features), zero


def int4_group_size(weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None) -> int:
    """Elements that share a scale, 32, 64 or 128, of a weight from ``prepack_int4``; 0 for tiles of no group size."""
    if not tiles_cuda.is_packed(weight_tiles):
        return weight_tiles.shape[1] * BLOCK // max(scale_tiles.shape[1], 1)
    zeros, size = zero_tiles is not None, weight_tiles.shape[2]
    return next((group for group in GROUP_SIZES if size == tiles_cuda.pair_bytes(group, zeros)), 0)


def on_cpu_order(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int
) -> Int4Tiles:
    """A weight from ``prepack_int4`` in the tiles of the CPU, which can be cut at 16 outputs."""
    if not tiles_cuda.is_packed(weight_tiles):
        return Int4Tiles(weight_tiles, scale_tiles, zero_tiles)
    return _pack_cpu(*unpack_cuda(weight_tiles, scale_tiles, zero_tiles, out_features))


def _pack_cpu(packed: Tensor, scale: Tensor, zero: Tensor | None) -> Int4Tiles:
    zero_tiles = None if zero is None else tiles.tile_columns(zero)
    return Int4Tiles(tiles.tile_codes(packed), tiles.tile_columns(scale), zero_tiles)


def pack_cuda(packed: Tensor, scale: Tensor, zero: Tensor | None) -> Int4Tiles:
    """``prepack_int4`` for GPUs, on any device."""
    groups = PAIR_INPUTS // (packed.shape[1] * 2 // max(scale.shape[1], 1))
    parts = [in_pairs(part, groups, 0).permute(0, 5, 1, 2, 4, 6, 3).contiguous().view(torch.uint8).flatten(3)
             for part in (scale.view(torch.int16), zero) if part is not None]  # fmt: skip
    beyond, shape = SYMMETRIC_ZERO if zero is None else 0, (0, scale.shape[1], SHAPE_ONLY)
    weight = tiles_cuda.pack_codes(packed, torch.cat(parts, -1), _spread, beyond)
    return Int4Tiles(weight, scale.new_empty(shape), None if zero is None else zero.new_empty(shape))


def unpack_cuda(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of ``pack_cuda``, bit for bit."""
    rest, columns = tiles_cuda.behind_codes(weight_tiles), scale_tiles.shape[1]
    count = rest.shape[-1] // (2 if zero_tiles is None else 3)  # scales of a tile
    groups = count // (PAIR_OUTPUTS // 2)

    def part(values: Tensor) -> Tensor:
        places = values.unflatten(-1, (4, 8, groups, 2)).permute(0, 2, 3, 6, 4, 1, 5)  # [p, m, w, h, r, c, group]
        return places.reshape(-1, weight_tiles.shape[1] * groups)[:out_features, :columns].contiguous()

    scale = part(rest[..., : 2 * count].contiguous().view(torch.int16)).view(torch.float16)
    zero = None if zero_tiles is None else part(rest[..., 2 * count :])
    group_size = PAIR_INPUTS // groups
    return tiles_cuda.unpack_codes(weight_tiles, out_features, columns * group_size, _gather), scale, zero


def _spread(codes: Tensor, register: int) -> Tensor:
    return (codes ^ 8) << 4 * register


def _gather(halves: Tensor, register: int) -> Tensor:
    return (halves >> 4 * register & 15) ^ 8
