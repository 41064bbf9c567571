"""What does each op compute, in plain torch? Runs everywhere; the compiled kernels are tested against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..formats import mxfp4
from .schema import check_mxfp4_linear

_CHUNK = 1 << 21  # dequantized weights in flight: 4 MiB in bfloat16, whatever the layer's size


def mxfp4_linear(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [..., in]`` times the dequantized weight ``[out, in]``, plus bias: ``[..., out]`` in x.dtype.

    The weight is dequantized to x.dtype in slices of output rows, so the transient memory stays under 16 MiB.
    """
    check_mxfp4_linear(x, weight_packed, weight_scale, bias)
    parts = [
        F.linear(x, mxfp4.dequantize(weight_packed[rows], weight_scale[rows], x.dtype), _part(bias, rows, x.dtype))
        for rows in row_slices(weight_packed.shape[0], x.shape[-1])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def sliced_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` over the very slices of ``mxfp4_linear``: a weight dequantized beforehand gives the same bits."""
    parts = [F.linear(x, weight[rows], _part(bias, rows, x.dtype)) for rows in row_slices(*weight.shape)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def row_slices(out_features: int, in_features: int) -> list[slice]:
    """Slices of output rows, set by the weight's shape alone; multiples of 32 rows keep every slice aligned."""
    step = max(32, _CHUNK // max(in_features, 1) // 32 * 32)
    return [slice(first, min(first + step, out_features)) for first in range(0, max(out_features, 1), step)]


def _part(bias: torch.Tensor | None, rows: slice, dtype: torch.dtype) -> torch.Tensor | None:
    return None if bias is None else bias[rows].to(dtype)
