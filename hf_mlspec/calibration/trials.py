"""What would layers give if their weights were rounded to nearest? Outputs of trial weights, as a format has them.

A trial takes some inputs of layers and their weights, and gives their outputs as the packed layers will compute them:
inputs rounded to integers of so many bits where these meet them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import activations, int4, zipper
from ..formats.zipper import Split

Trial = Callable[[Tensor, Iterable[Tensor]], Iterator[Tensor]]  # inputs [n, in], weights [out, in] -> outputs [n, out]


def int4_trial(group_size: int, symmetric: bool, bits: int, clip: float = 1.0) -> Trial:
    """Of int4 groups and inputs of 16, 8 or 4 bits."""

    def outputs(rows: Tensor, weights: Iterable[Tensor]) -> Iterator[Tensor]:
        read = read_as(rows, group_size, bits, clip)
        for weight in weights:
            coded = int4.quantize(weight, group_size, symmetric)
            del weight  # a float32 one that nobody else holds makes room for its values
            yield F.linear(read, int4.dequantize(*coded))

    return outputs


def zipper_trial(how: Split, bits: int) -> Trial:
    """Of weights in two parts with one scale a row: the low part meets inputs of so many bits, the high part inputs as
    they are, in bfloat16 (ZipperQuant)."""

    def outputs(rows: Tensor, weights: Iterable[Tensor]) -> Iterator[Tensor]:
        wide = rows.to(torch.bfloat16).float()
        read = read_as(wide if bits == 16 else rows, zipper.activation_group(rows.shape[-1]), bits)
        for weight in weights:
            codes, scale = zipper.quantize(weight, how)
            low, high = zipper.split(codes, how)
            sums = F.linear(read, low.float() * how.low_unit) + F.linear(wide, high.float() * how.high_unit)
            yield sums * scale.float().T

    return outputs


def read_as(rows: Tensor, group_size: int, bits: int, clip: float = 1.0) -> Tensor:
    """What a layer multiplies where its inputs have so many bits, float32; 16: as they are."""
    if bits == 16:
        return rows
    return activations.dequantize_rows(*activations.quantize_rows(rows, group_size, bits, clip), group_size)
