"""What replaces nn.Linear where the last 128 inputs of an int4 weight are int8 outliers?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import ops
from ..formats.int4_int8 import Int4Int8Parts
from .packed import PackedLinear
from .packed_formats import Packing, register_packing
from .switch import PrecisionSwitch


class Int4Int8Linear(PackedLinear):
    """``y = x W^T + b`` with W in int4, groups of 128, and its last 128 columns in int8.

        parameter             dtype     on disk, in state_dict()   in tiles, from the first forward on
        weight_packed         uint8     [out, (in - 128) / 2]      [ceil(out / 16), (in + 128) / 32, 256]
        weight_scale          float16   [out, in / 128 - 1]        [ceil(out / 16), in / 128 + 1, 16]
        weight_outlier        int8      [out, 128]                 [0, 128]: its nibbles are among weight_packed
        weight_outlier_scale  float16   [out]                      [out]

    On a GPU with kernels tiles have other shapes: ops/int4_int8.py.
    At 16 activation bits x is rounded to bfloat16; at 8 or 4 to integers, a scale per row and 128 elements, outliers
    always to 8. Which inputs are outliers says the transform "order".
    """

    format = "int4_int8"
    group_size = 128


def _prepack(
    packed: torch.Tensor, scale: torch.Tensor, outlier: torch.Tensor, outlier_scale: torch.Tensor
) -> Int4Int8Parts:
    tiles = ops.prepack_int4_int8(packed, scale, outlier, outlier_scale)
    return Int4Int8Parts(*tiles, outlier[:0].clone(), outlier_scale)


def _unprepack(
    packed: torch.Tensor, scale: torch.Tensor, outlier: torch.Tensor, outlier_scale: torch.Tensor, rows: int
) -> Int4Int8Parts:
    return Int4Int8Parts(*ops.unprepack_int4_int8(packed, scale, rows))


def _multiply(
    x: torch.Tensor, tiles: Int4Int8Parts, rows: int, bias: torch.Tensor | None, switch: PrecisionSwitch
) -> torch.Tensor:
    how = {"activation_bits": switch.activation_bits, "activation_clip": switch.activation_clip}
    return ops.int4_int8_linear(x, tiles.packed, tiles.scale, rows, bias, **how)


def _join(weights: Sequence[Int4Int8Parts]) -> Int4Int8Parts:
    return Int4Int8Parts(*(torch.cat(parts) for parts in zip(*weights, strict=True)))


def _beside(
    packed: torch.Tensor, scale: torch.Tensor, outlier: torch.Tensor, outlier_scale: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    return None, None, outlier[:0].clone(), outlier_scale


register_packing(Packing(Int4Int8Linear, _prepack, _unprepack, _multiply, beside=_beside, join=_join))
