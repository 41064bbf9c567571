"""What is an int4 weight with int8 outliers to the kernels? An int4 weight with 128 more columns.

An int8 code is ``16 high + low`` of two signed nibbles. So the tiles of int4 (tiles.py) hold three parts side by side:
the int4 codes, high nibbles of the outliers with 16 times their scale, and low nibbles. The last 128 elements of x
meet both: kernels of the CPU read them from rows that have them twice, those of GPUs read them again. The bytes are
those of the codes, and every kernel of int4 serves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import int4
from ..formats.int4_int8 import GROUP, OUTLIERS, Int4Int8Weight
from ..formats.packing import pack_nibbles, unpack_nibbles
from . import tiles, tiles_cuda
from .cuda_library import serves
from .int4 import on_cpu_order, pack_cuda, unpack_cuda
from .operator import Operands, like_x, operator
from .products import bias_of, finish, in_slices, integer_product, rounded, tiles_of

_NIBBLES_AT_ZERO = 16 * int4.SYMMETRIC_ZERO + int4.SYMMETRIC_ZERO  # the byte of an outlier code 0


class Int4Int8Tiles(NamedTuple):
    """On the CPU uint8 ``[ceil(out / 16), (in + 128) / 32, 256]`` and float16 ``[ceil(out / 16), in / 128 + 1, 16]``;
    on a GPU that kernels serve those of int4 with so many inputs (tiles_cuda.py)."""

    weight: Tensor
    scale: Tensor


def _check_linear(given: Operands) -> None:
    on_gpu = given.weight_tiles.is_cuda and tiles_cuda.is_packed(given.weight_tiles)
    if on_gpu:
        columns = tiles_cuda.check_pairs(given, GROUP, tiles_cuda.pair_bytes(GROUP))
    else:
        columns = tiles.check_tiles(given)
    if columns % GROUP or columns < GROUP + 2 * OUTLIERS:
        raise ValueError(
            f"{given.op}: weight_tiles have {columns} columns, expected a multiple of {GROUP} from "
            f"{GROUP + 2 * OUTLIERS} on: in_features and {OUTLIERS} outliers again"
        )
    groups = [0 if on_gpu else given.weight_tiles.shape[0], columns // GROUP, tiles.TILE_OUTPUTS]
    given.require_part("scale_tiles", torch.float16, groups)
    given.require_choice("activation_bits", (4, 8, 16))
    given.require_activation_clip()
    given.require_rows(columns - OUTLIERS, given.out_features)


@operator(_check_linear, like_x)
def _int4_int8_linear(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None, activation_bits: int,
    activation_clip: float,
) -> Tensor:  # fmt: skip
    weight_tiles, scale_tiles, _ = on_cpu_order(weight_tiles, scale_tiles, None, out_features)

    def part(rows: slice) -> Tensor:
        cut = tiles_of(rows)
        weight = Int4Int8Weight(*unprepack_int4_int8(weight_tiles[cut], scale_tiles[cut], rows.stop - rows.start))
        if activation_bits == 16:
            return finish(F.linear(rounded(x), weight.dequantize()), bias_of(bias, rows), x.dtype)
        codes = unpack_nibbles(weight.weight_packed).to(torch.int8) - int4.SYMMETRIC_ZERO
        inputs, outliers = x.float().split([x.shape[-1] - OUTLIERS, OUTLIERS], -1)
        scale, outlier_scale = weight.weight_scale.double(), weight.weight_outlier_scale.double().unsqueeze(-1)
        sums = integer_product(inputs, codes, scale, GROUP, activation_bits, None, activation_clip)
        sums = sums + integer_product(outliers, weight.weight_outlier, outlier_scale, OUTLIERS, 8, None)
        return finish(sums, bias_of(bias, rows), x.dtype)

    return in_slices(part, out_features, x.shape[-1])


def int4_int8_linear(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None = None, *,
    activation_bits: int = 16, activation_clip: float = 1.0,
) -> Tensor:  # fmt: skip
    """float x ``[..., in]``, outliers last, times a weight from ``prepack_int4_int8`` -> ``[..., out]``.

    activation_bits 16: x is rounded to bfloat16; 8: to int8, a scale per row and 128 elements; 4: the same, but all
    groups except the outliers to 4 bits (Atom's W4A4). activation_clip: of those at 4 bits, .1 to 1.
    """
    return _int4_int8_linear(x, weight_tiles, scale_tiles, out_features, bias, activation_bits, activation_clip)


def prepack_int4_int8(packed: Tensor, scale: Tensor, outlier: Tensor, outlier_scale: Tensor) -> Int4Int8Tiles:
    """uint8 ``[out, (in - 128) / 2]``, float16 ``[out, in / 128 - 1]``, int8 ``[out, 128]``, float16 ``[out]`` ->
    weight_tiles, scale_tiles. TypeError and ValueError as ``prepack_mxfp4``."""
    tiles.require_on_disk(packed, scale, None)
    codes = (outlier.to(torch.int16) + _NIBBLES_AT_ZERO).to(torch.uint8)
    nibbles = torch.cat([packed, pack_nibbles(codes >> 4), pack_nibbles(codes & 15)], -1)
    low = outlier_scale.unsqueeze(-1)
    scales = torch.cat([scale, low * 16, low], -1)
    if serves(packed):
        return Int4Int8Tiles(*pack_cuda(nibbles, scales, None)[:2])
    return Int4Int8Tiles(tiles.tile_codes(nibbles), tiles.tile_columns(scales))


def unprepack_int4_int8(
    weight_tiles: Tensor, scale_tiles: Tensor, out_features: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of ``prepack_int4_int8``, bit for bit."""
    if tiles_cuda.is_packed(weight_tiles):
        nibbles, scales, _ = unpack_cuda(weight_tiles, scale_tiles, None, out_features)
    else:
        tiles.require_tiles(weight_tiles, scale_tiles, out_features)
        nibbles = tiles.untile_codes(weight_tiles, out_features)
        scales = tiles.untile_columns(scale_tiles, out_features)
    half = OUTLIERS // 2  # bytes of nibbles
    packed, high, low = nibbles.split([nibbles.shape[1] - 2 * half, half, half], -1)
    outlier = (unpack_nibbles(high).to(torch.int16) * 16 + unpack_nibbles(low) - _NIBBLES_AT_ZERO).to(torch.int8)
    return packed.contiguous(), scales[:, :-2].contiguous(), outlier, scales[:, -1].contiguous()
