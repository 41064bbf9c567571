"""How do plain torch's linears multiply? In slices of a weight's outputs; the compiled kernels are tested against it.

A reference computes the quantity of its kernel: the same roundings of weights and activations, integer products
without error, sums in float32 or wider. Only the order of those sums is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import activations
from .tiles import TILE_OUTPUTS

_CHUNK = 1 << 21  # dequantized weights in flight: 4 MiB in bfloat16, whatever the layer's size


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


def in_slices(part: Callable[[slice], Tensor], out_features: int, in_features: int) -> Tensor:
    """What ``part`` gives for slices of output rows, side by side."""
    parts = [part(rows) for rows in row_slices(out_features, in_features)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def tiles_of(rows: slice) -> slice:
    """The tiles of the CPU that hold a slice of output rows."""
    return slice(rows.start // TILE_OUTPUTS, -(-rows.stop // TILE_OUTPUTS))


def bf16_product(x: Tensor, weight_in: Callable[[torch.dtype], Tensor], bias: Tensor | None) -> Tensor:
    """weight_in(dtype) gives the weight, exact in bfloat16. torch's bfloat16 product sums in float32, too."""
    if x.dtype == torch.bfloat16:
        return F.linear(x, weight_in(torch.bfloat16), None if bias is None else bias.to(x.dtype))
    return finish(F.linear(rounded(x), weight_in(torch.float32)), bias, x.dtype)


def integer_product(
    x: Tensor, codes: Tensor, scale: Tensor, group: int, bits: int, bias: Tensor | None, clip: float = 1.0
) -> Tensor:
    """codes int8 ``[out, in]``, scale float64 ``[out, in / group]``: the sum over groups of (integer dot) * scales."""
    x_codes, x_scale = activations.quantize_rows(x.reshape(x.shape[:-1].numel(), x.shape[-1]), group, bits, clip)
    if x.shape[-1] == 0:
        return finish(x.new_zeros(*x.shape[:-1], len(codes)), bias, x.dtype)
    sums = product_of_codes(x_codes, x_scale, codes, scale, group)
    return finish(sums.view(*x.shape[:-1], len(codes)), bias, x.dtype)


def product_of_codes(x_codes: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """x_codes int8 ``[rows, in]``, x_scale float32 ``[rows, in / group]``, the others as of `integer_product` ->
    float32 ``[rows, out]``."""
    out, (rows, size) = len(codes), x_codes.shape
    # [in / group, rows, group] x [in / group, group, out]; at most 127 x 63 x 32 or 127 x 15 x 128: exact in float32.
    left = x_codes.float().view(rows, size // group, group).transpose(0, 1)
    dots = torch.bmm(left, codes.float().view(out, size // group, group).permute(1, 2, 0))
    sums = (dots.double() * x_scale.double().T.unsqueeze(-1) * scale.T.unsqueeze(1)).sum(0)
    return sums.float()


def rounded(x: Tensor) -> Tensor:
    """To bfloat16, as float32."""
    return x.to(torch.bfloat16).to(torch.float32)


def finish(sums: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Float32 sums, plus bias, rounded once."""
    return (sums if bias is None else sums + bias.float()).to(dtype)


def bias_of(bias: Tensor | None, rows: slice) -> Tensor | None:
    """That of a slice of output rows."""
    return None if bias is None else bias[rows]
