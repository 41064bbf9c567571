"""What is an MXFP4 weight to the kernels: its op, its plain torch, and its tiles on every device (tiles.py)?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import mxfp4
from ..formats.mxfp4 import BLOCK, NAN_SCALE
from ..formats.packing import unpack_nibbles
from . import tiles, tiles_cuda
from .cuda_library import serves
from .operator import Operands, like_x, operator
from .products import bf16_product, bias_of, in_slices, integer_product, tiles_of

# E2M1 codes times two, as integers.
_DOUBLED = tuple(int(2 * m) for m in mxfp4.MAGNITUDES) + tuple(-int(2 * m) for m in mxfp4.MAGNITUDES)
# Of GPUs. Where the sign and the other bits of register i stand; scale bytes up to _UNSHIFTED need no shift.
_SIGN_BITS, _OTHER_BITS = (15, 12, 13, 14), (6, 3, 0, 9)
_SCALE_BIAS, _UNSHIFTED = 126, 128


class Mxfp4Tiles(NamedTuple):
    """On the CPU uint8 ``[ceil(out / 16), in / 32, 256]`` and ``[ceil(out / 16), in / 32, 16]``; on a GPU that kernels
    serve as tiles_cuda.py says."""

    weight: Tensor
    scale: Tensor


def _check_linear(given: Operands) -> None:
    if given.weight_tiles.is_cuda and tiles_cuda.is_packed(given.weight_tiles):
        in_features = tiles_cuda.check_pairs(given, BLOCK, tiles_cuda.pair_bytes(BLOCK, mxfp4=True))
        scale_shape = [1, in_features // BLOCK, 4]
    else:
        in_features = tiles.check_tiles(given)
        scale_shape = [*given.weight_tiles.shape[:2], tiles.TILE_OUTPUTS]
    given.require_part("scale_tiles", torch.uint8, scale_shape)
    given.require_choice("activation_bits", (8, 16))
    given.require_rows(in_features, given.out_features)


@operator(_check_linear, like_x)
def _mxfp4_linear(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None, activation_bits: int
) -> Tensor:
    weight_tiles, scale_tiles = on_cpu_order(weight_tiles, scale_tiles, out_features)

    def part(rows: slice) -> Tensor:
        cut = tiles_of(rows)
        weight = unprepack_mxfp4(weight_tiles[cut], scale_tiles[cut], rows.stop - rows.start)
        if activation_bits == 16:
            return bf16_product(x, lambda dtype: mxfp4.dequantize(*weight, dtype), bias_of(bias, rows))
        codes = torch.tensor(_DOUBLED, dtype=torch.int8, device=x.device)[unpack_nibbles(weight[0]).int()]
        scale = mxfp4.scale_values(torch.float64, x.device)[weight[1].int()] / 2
        return integer_product(x, codes, scale, BLOCK, 8, bias_of(bias, rows))

    return in_slices(part, out_features, x.shape[-1])


def mxfp4_linear(
    x: Tensor,
    weight_tiles: Tensor,
    scale_tiles: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation_bits: int = 16,
) -> Tensor:
    """float x ``[..., in]`` times an MXFP4 weight from ``prepack_mxfp4`` -> ``[..., out]``; bias ``[out]`` or None.

    activation_bits 16: x is rounded to bfloat16. 8: x is quantized to int8 with one scale per row and block of 32, the
    dot products of a block are integers and are scaled late (ML-SpecQD, arXiv 2503.13565). Sums are float32. On a GPU
    linears round their results to bfloat16.
    """
    return _mxfp4_linear(x, weight_tiles, scale_tiles, out_features, bias, activation_bits)


def prepack_mxfp4(weight_packed: Tensor, weight_scale: Tensor) -> Mxfp4Tiles:
    """uint8 ``[out, in / 2]`` and ``[out, in / 32]`` -> weight_tiles, scale_tiles.

    TypeError for another dtype, ValueError for shapes that are no MXFP4 weight, and on a GPU for NaN scales.
    """
    tiles.require_on_disk(weight_packed, weight_scale, BLOCK)
    if serves(weight_packed):
        return pack_cuda(weight_packed, weight_scale)
    return Mxfp4Tiles(tiles.tile_codes(weight_packed), tiles.tile_columns(weight_scale))


def unprepack_mxfp4(weight_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``prepack_mxfp4``, bit for bit."""
    if tiles_cuda.is_packed(weight_tiles):
        return unpack_cuda(weight_tiles, scale_tiles, out_features)
    tiles.require_tiles(weight_tiles, scale_tiles, out_features)
    return tiles.untile_codes(weight_tiles, out_features), tiles.untile_columns(scale_tiles, out_features)


def on_cpu_order(weight_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> Mxfp4Tiles:
    """A weight from ``prepack_mxfp4`` in the tiles of the CPU, which can be cut at 16 outputs."""
    if not tiles_cuda.is_packed(weight_tiles):
        return Mxfp4Tiles(weight_tiles, scale_tiles)
    packed, scale = unpack_cuda(weight_tiles, scale_tiles, out_features)
    return Mxfp4Tiles(tiles.tile_codes(packed), tiles.tile_columns(scale))


def pack_cuda(packed: Tensor, scale: Tensor) -> Mxfp4Tiles:
    """``prepack_mxfp4`` for GPUs, on any device. ValueError for NaN scales, which the kernels would read
    as numbers."""
    if (bad := int((scale == NAN_SCALE).sum())) > 0:
        raise ValueError(f"prepack: {bad} of {scale.numel()} scales are NaN ({NAN_SCALE}): quantize finite weights")
    scales, shifts = tiles_cuda.exponents_in_pairs(scale, _SCALE_BIAS, _UNSHIFTED, 1)
    return Mxfp4Tiles(tiles_cuda.pack_codes(packed, scales, _spread, 0), shifts)


def unpack_cuda(weight_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``pack_cuda``, bit for bit."""
    scale = tiles_cuda.exponents_of_pairs(weight_tiles, scale_tiles, out_features, _SCALE_BIAS)
    return tiles_cuda.unpack_codes(weight_tiles, out_features, scale_tiles.shape[1] * BLOCK, _gather), scale


def _spread(codes: Tensor, register: int) -> Tensor:
    return (codes >> 3) << _SIGN_BITS[register] | (codes & 7) << _OTHER_BITS[register]


def _gather(halves: Tensor, register: int) -> Tensor:
    return (halves >> _SIGN_BITS[register] & 1) << 3 | (halves >> _OTHER_BITS[register] & 7)
