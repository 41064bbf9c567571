"""What does each linear compute, in plain torch? Runs everywhere; the compiled kernels are tested against it.

A reference computes the quantity of its kernel: the same roundings of weights and activations, integer products
without error, sums in float32 or wider. Only the order of those sums is torch's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import activations, int4, mxfp4
from ..formats.packing import unpack_nibbles
from . import operands
from .reference_rows import ragged_attention, rms_norm, rope_write, silu_mul
from .tiles import TILE_OUTPUTS, int4_on_cpu_order, mxfp4_on_cpu_order, unprepack_int4, unprepack_mxfp4

__all__ = [
    "bf16_linear",
    "f32_linear",
    "int4_dequantize",
    "int4_linear",
    "mxfp4_linear",
    "quantize_rows",
    "ragged_attention",
    "rms_norm",
    "rope_write",
    "silu_mul",
    "sliced_linear",
]

_CHUNK = 1 << 21  # dequantized weights in flight: 4 MiB in bfloat16, whatever the layer's size
# E2M1 codes times two, as integers.
_DOUBLED = tuple(int(2 * m) for m in mxfp4.MAGNITUDES) + tuple(-int(2 * m) for m in mxfp4.MAGNITUDES)


def mxfp4_linear(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None, activation_bits: int
) -> Tensor:
    """``x [..., in]`` times the weight, plus bias: ``[..., out]`` in x.dtype, in slices of output rows.

    16 bits: x rounded to bfloat16 times the dequantized weight. 8 bits: x in int8, one scale per row and block of 32;
    integer dot products of a block, scaled late.
    """
    operands.check_mxfp4_linear(x, weight_tiles, scale_tiles, out_features, bias, activation_bits)
    weight_tiles, scale_tiles = mxfp4_on_cpu_order(weight_tiles, scale_tiles, out_features)

    def part(rows: slice) -> Tensor:
        tiles = tiles_of(rows)
        weight = unprepack_mxfp4(weight_tiles[tiles], scale_tiles[tiles], rows.stop - rows.start)
        if activation_bits == 16:
            return bf16_product(x, lambda dtype: mxfp4.dequantize(*weight, dtype), bias_of(bias, rows))
        codes = torch.tensor(_DOUBLED, dtype=torch.int8, device=x.device)[unpack_nibbles(weight[0]).int()]
        scale = mxfp4.scale_values(torch.float64, x.device)[weight[1].int()] / 2
        return integer_product(x, codes, scale, mxfp4.BLOCK, 8, bias_of(bias, rows))

    return in_slices(part, out_features, x.shape[-1])


def int4_linear(
    x: Tensor,
    weight_tiles: Tensor,
    scale_tiles: Tensor,
    zero_tiles: Tensor | None,
    out_features: int,
    bias: Tensor | None,
    group_size: int,
    activation_bits: int,
) -> Tensor:
    """As ``mxfp4_linear``, with int4 weights and groups of ``group_size``; 4 or 8 bits quantize x in the same
    groups."""
    operands.check_int4_linear(
        x, weight_tiles, scale_tiles, zero_tiles, out_features, bias, group_size, activation_bits
    )
    weight_tiles, scale_tiles, zero_tiles = int4_on_cpu_order(weight_tiles, scale_tiles, zero_tiles, out_features)

    def part(rows: slice) -> Tensor:
        tiles = tiles_of(rows)
        zero = None if zero_tiles is None else zero_tiles[tiles]
        packed, scale, zero = unprepack_int4(weight_tiles[tiles], scale_tiles[tiles], zero, rows.stop - rows.start)
        if activation_bits == 16:
            dense = int4.dequantize(packed, scale, zero)  # float32: code x scale does not fit bfloat16
            return finish(F.linear(rounded(x), dense), bias_of(bias, rows), x.dtype)
        codes = unpack_nibbles(packed).to(torch.int8).unflatten(-1, (-1, group_size))
        codes = codes - (int4.SYMMETRIC_ZERO if zero is None else zero.to(torch.int8).unsqueeze(-1))
        return integer_product(x, codes.flatten(-2), scale.double(), group_size, activation_bits, bias_of(bias, rows))

    return in_slices(part, out_features, x.shape[-1])


def int4_dequantize(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int, group_size: int
) -> Tensor:
    """bfloat16 ``[out, in]``: (code - zero) * scale, rounded once."""
    operands.check_int4_dequantize(weight_tiles, scale_tiles, zero_tiles, out_features, group_size)
    if weight_tiles.numel() == 0:
        return weight_tiles.new_empty((out_features, scale_tiles.shape[1] * group_size), dtype=torch.bfloat16)
    return int4.dequantize(*unprepack_int4(weight_tiles, scale_tiles, zero_tiles, out_features), torch.bfloat16)


def bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x rounded to bfloat16 times a bfloat16 weight ``[out, in]``: ``[..., out]`` in x.dtype."""
    operands.check_bf16_linear(x, weight, bias)
    return in_slices(lambda rows: bf16_product(x, weight[rows].to, bias_of(bias, rows)), *weight.shape)


def f32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x times a float32 weight ``[out, in]``: ``[..., out]`` in x.dtype."""
    operands.check_f32_linear(x, weight, bias)
    return finish(F.linear(x.float(), weight), bias, x.dtype)


def quantize_rows(x: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    """codes int8 ``[..., in]``, scales float32 ``[..., ceil(in / group_size)]``: formats/activations.py."""
    operands.check_quantize_rows(x, group_size, bits)
    return activations.quantize_rows(x, group_size, bits)


def sliced_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` over the very slices of ``mxfp4_linear``: for bfloat16 x, a weight dequantized beforehand gives the
    same bits."""
    return in_slices(
        lambda rows: F.linear(x, weight[rows], None if bias is None else bias[rows].to(x.dtype)), *weight.shape
    )


def row_slices(out_features: int, in_features: int) -> list[slice]:
    """Slices of output rows, set by the weight's shape alone; multiples of 32 rows keep every slice aligned."""
    step = max(32, _CHUNK // max(in_features, 1) // 32 * 32)
    return [slice(first, min(first + step, out_features)) for first in range(0, max(out_features, 1), step)]


def in_slices(part, out_features: int, in_features: int) -> Tensor:
    parts = [part(rows) for rows in row_slices(out_features, in_features)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def tiles_of(rows: slice) -> slice:
    return slice(rows.start // TILE_OUTPUTS, -(-rows.stop // TILE_OUTPUTS))


def bf16_product(x: Tensor, weight_in, bias: Tensor | None) -> Tensor:
    """weight_in(dtype) gives the weight, exact in bfloat16. torch's bfloat16 product sums in float32, too."""
    if x.dtype == torch.bfloat16:
        return F.linear(x, weight_in(torch.bfloat16), None if bias is None else bias.to(x.dtype))
    return finish(F.linear(rounded(x), weight_in(torch.float32)), bias, x.dtype)


def integer_product(x: Tensor, codes: Tensor, scale: Tensor, group: int, bits: int, bias: Tensor | None) -> Tensor:
    """codes int8 ``[out, in]``, scale float64 ``[out, in / group]``: the sum over groups of (integer dot) * scales."""
    x_codes, x_scale = activations.quantize_rows(x.reshape(x.shape[:-1].numel(), x.shape[-1]), group, bits)
    out, (rows, size) = codes.shape[0], x_codes.shape
    if size == 0:
        return finish(x.new_zeros(*x.shape[:-1], out), bias, x.dtype)
    # [in / group, rows, group] x [in / group, group, out]; at most 127 x 63 x 32 or 127 x 15 x 128: exact in float32.
    left = x_codes.float().view(rows, size // group, group).transpose(0, 1)
    dots = torch.bmm(left, codes.float().view(out, size // group, group).permute(1, 2, 0))
    sums = (dots.double() * x_scale.double().T.unsqueeze(-1) * scale.T.unsqueeze(1)).sum(0)
    return finish(sums.float().view(*x.shape[:-1], out), bias, x.dtype)


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def finish(sums: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (sums if bias is None else sums + bias.float()).to(dtype)


def bias_of(bias: Tensor | None, rows: slice) -> Tensor | None:
    return None if bias is None else bias[rows]
