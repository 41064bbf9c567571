"""Who computes? The only door to compiled code: typed functions over the ``mlspec`` operators."""

from __future__ import annotations

import torch

from .library import KernelError, kernel_table, why_not_compiled

__all__ = ["KernelError", "kernel_table", "mxfp4_linear", "why_not_compiled"]

_mxfp4_linear = torch.ops.mlspec.mxfp4_linear.default


def mxfp4_linear(
    x: torch.Tensor, weight_packed: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [..., in]`` (float32, bfloat16, float16) times an MXFP4 weight -> ``[..., out]`` in x.dtype.

    weight_packed uint8 ``[out, in / 2]``, weight_scale uint8 ``[out, in / 32]`` (formats/mxfp4.py), bias ``[out]`` or
    None. Sums are float32. TypeError/ValueError for operands that do not fit; KernelError without a kernel under
    MLSPEC_REQUIRE_KERNELS=1.
    """
    return _mxfp4_linear(x, weight_packed, weight_scale, bias)
