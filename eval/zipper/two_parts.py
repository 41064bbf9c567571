"""What does a linear compute whose weight is any low part and any high part? Dense, for splits that no format has.

The low part meets inputs rounded to integers of 16 (none), 8 or 4 bits, the high part inputs as they are, which is
what `ops.zipper_linear` computes, up to the order of float32 sums.

    signed       q = u + 16 h with the sign restored: formats/zipper, mode "exact"
    halved       the same, low part of 4 bits: mode "paper"
    clamped      low = the nearest of five bits: mode "clamp"
    unsigned     low = q mod 16 in 0 .. 15, high = floor(q / 16): two's complement as it is (ZipperQuant, C.1)
    by value     outliers (those whose high part is not 0) are whole in the high part, 0 in the low one, whose 4-bit
                 codes have a step of their own, largest / 7: as a split by values has it (ZipperQuant, 4.2)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_mlspec.calibration.trials import read_as
from hf_mlspec.formats import ZipperWeight, zipper
from hf_mlspec.formats.zipper import Split
from hf_mlspec.nn.transforms import Transform
from hf_mlspec.nn.zipper import ZipperLinear

SPLITS = ("signed", "halved", "clamped", "unsigned", "by value")
_MODES = {"signed": "exact", "halved": "paper", "clamped": "clamp"}


class TwoParts(nn.Module):
    """low and high float32 ``[out, in]``; bits: of the activations that the low part meets."""

    def __init__(
        self, low: Tensor, high: Tensor, bias: Tensor | None, transform: Transform, tensors: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.bits, self.transform, self.own, self.bias = 16, transform, dict(tensors), bias
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        given = self.transform.apply(x, self.own)
        wide, group = given.to(torch.bfloat16).float(), zipper.activation_group(x.shape[-1])
        read = wide if self.bits == 16 else read_as(given, group, self.bits)
        sums = F.linear(read, self.low) + F.linear(wide, self.high)
        return (sums if self.bias is None else sums + self.bias.float()).to(x.dtype)


def parts_of(codes: Tensor, scale: Tensor, word: str, how: Split) -> tuple[Tensor, Tensor]:
    """int8 codes ``[out, in]``, float scale ``[out, 1]`` -> low and high, float32, of the split of that word."""
    step = 2**how.low_bits
    if word in _MODES:
        own = replaced(how, word)
        low, high = zipper.split(codes, own)
        return low.float() * own.low_unit * scale, high.float() * own.high_unit * scale
    wide = codes.to(torch.int16)
    if word == "unsigned":
        return (wide & step - 1).float() * scale, (wide >> how.low_bits).float() * step * scale
    outlier = (wide < -step) | (wide >= step)
    values = codes.float() * scale
    inliers = values.masked_fill(outlier, 0)
    most = 2 ** (how.low_bits - 1) - 1
    own_step = (inliers.abs().amax(1, keepdim=True) / most).clamp(min=1e-12)
    return (inliers / own_step).round() * own_step, values.masked_fill(~outlier, 0)


def replaced(how: Split, word: str) -> Split:
    """The split that a word names, of as many bits."""
    return how._replace(mode=_MODES.get(word, how.mode))


def take_apart(model: nn.Module, word: str) -> list[TwoParts]:
    """Put `TwoParts` of this split in place of all zipper layers; -> them. Codes stay what calibration chose."""
    made = []
    for name, layer in list(model.named_modules()):
        if isinstance(layer, ZipperLinear):
            weight: ZipperWeight = layer.packed_weight()
            parts = parts_of(weight.codes(), weight.weight_scale.float(), word, weight.how)
            made.append(TwoParts(*parts, layer.bias, layer.transform, layer.transform_tensors()))
            model.set_submodule(name, made[-1])
    return made
