"""Which codes does a weight get whose last 128 inputs are outliers?

Of ``in`` columns the last 128 are int8 codes -119..119 with a scale per row, all others int4 codes in groups of 128,
symmetric, as in int4.py:

    value = (code - 8) * scale          of the first in - 128 columns, a scale per group
    value = code * outlier_scale        of the last 128, outlier_scale = amax / 119 of the row's, nothing is clipped

Outliers are inputs whose activations are large. A layer whose inputs come in another order moves them to the end with
the transform "order" (nn/transforms.py), as the method "atom" does. At 4 activation bits the first inputs meet 4-bit
codes per token and group, outliers 8-bit codes with one scale per token.

Kernels read an int8 code as two signed nibbles, 16 high + low: hence no code beyond 119, and outlier_scale is at most
65504 / 16. Scales are float16. A row of zeros has outlier_scale 1. in_features is a multiple of 128 and at least 256.

Source: Atom (Zhao et al., arXiv 2310.19102, section 4.1): mixed precision with 128 channels in INT8.

On disk:

    X.weight_packed         uint8    [out, (in - 128) / 2]     two codes 0..15 a byte, low nibble first
    X.weight_scale          float16  [out, in / 128 - 1]       step of each group, above 0
    X.weight_outlier        int8     [out, 128]                codes of the last 128 inputs
    X.weight_outlier_scale  float16  [out]                     their step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import int4
from .damage import require_none, require_positive
from .record import Format
from .weight import NibbleWeight, require_float_matrix

OUTLIERS = 128  # inputs with int8 codes
GROUP = 128  # of the int4 codes, and of activations
LARGEST_CODE = 119  # 16 * 7 + 7
LARGEST_SCALE = torch.finfo(torch.float16).max / 16
_SMALLEST_SCALE = 2.0**-24  # float16's smallest subnormal


def require_inputs(group: int, in_features: int) -> None:
    """ValueError unless ``in_features`` is a multiple of 128 and at least 256."""
    if in_features % GROUP or in_features < OUTLIERS + GROUP:
        raise ValueError(
            f"in_features is {in_features}, int4-int8 takes multiples of {GROUP} from {OUTLIERS + GROUP} on, "
            f"{OUTLIERS} of them outliers: keep this layer in 16 bits with skip_modules, or use format 'int4'"
        )


def quantize_outliers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float ``[out, 128]`` -> codes int8 ``[out, 128]``, scales float16 ``[out]``; ValueError naming the row for NaN,
    Inf or a scale beyond 65504 / 16."""
    wide = weight.float()
    largest = wide.abs().amax(-1)
    fits = largest / LARGEST_CODE <= LARGEST_SCALE  # NaN does not
    if not fits.all():
        row = int((~fits).nonzero()[0])
        raise ValueError(
            f"int4-int8: row {row} holds an outlier of {largest[row].item():g}, there are {LARGEST_CODE} steps of at "
            f"most {LARGEST_SCALE:g}: repair the checkpoint or keep this layer in 16 bits"
        )
    scale = (largest / LARGEST_CODE).clamp(_SMALLEST_SCALE, LARGEST_SCALE).half()
    codes = (wide / scale.float().unsqueeze(-1)).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8), torch.where(largest > 0, scale, 1.0)


class Int4Int8Parts(NamedTuple):
    """As on disk. In tiles (ops/int4_int8.py) ``outlier`` has no elements and ``outlier_scale`` stays as it is."""

    packed: torch.Tensor
    scale: torch.Tensor
    outlier: torch.Tensor
    outlier_scale: torch.Tensor


@dataclass(frozen=True)
class Int4Int8Weight(NibbleWeight):
    """One linear layer's int4 weight with int8 outliers, as saved. ``name`` is only used in messages."""

    PARTS = Int4Int8Parts
    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_outlier: torch.Tensor
    weight_outlier_scale: torch.Tensor
    name: str = "weight"

    @classmethod
    def from_dense(cls, weight: torch.Tensor, name: str = "weight") -> Int4Int8Weight:
        """Round ``[out, in]`` floats, the last 128 inputs outliers, int4 scales searched as in int4.py. TypeError for
        another dtype, ValueError naming the tensor for sizes, NaN, Inf and what float16 has no scale for."""
        try:
            _, in_features = require_float_matrix("int4-int8 quantizes", weight)
            require_inputs(GROUP, in_features)
            packed, scale, _ = int4.quantize(weight[:, :-OUTLIERS], GROUP)
            return cls(packed, scale, *quantize_outliers(weight[:, -OUTLIERS:]), name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    @property
    def in_features(self) -> int:
        """Columns, outliers included."""
        return self.weight_packed.shape[1] * 2 + OUTLIERS

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[out, in]`` in ``dtype``: exact in float32, narrower types round once."""
        outliers = self.weight_outlier.float() * self.weight_outlier_scale.float().unsqueeze(-1)
        return torch.cat([int4.dequantize(self.weight_packed, self.weight_scale, None, dtype), outliers.to(dtype)], -1)

    def validate(self, out_features: int | None = None, in_features: int | None = None) -> Int4Int8Weight:
        """Itself, or one specific error: TypeError for a dtype, ValueError for a shape, a truncated tensor, a scale
        that is NaN, Inf, zero, negative or too large, or a code beyond 119."""
        shape = out_features or self.out_features, in_features or self.in_features
        try:
            require_inputs(GROUP, shape[1])
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        self.require_like(zeros(shape, torch.device("meta")), FORMAT.title)
        for part, check in FORMAT.value_checks.items():
            check(self.name, f"weight_{part}", getattr(self, f"weight_{part}"))
        return self


def _require_codes(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_meta:
        beyond = tensor.to(torch.int16).abs() > LARGEST_CODE
        require_none(beyond, name, tensor_name, tensor, f"codes beyond {LARGEST_CODE}",
                     "was written when outlier codes went to 127: quantize the model again")


def _require_outlier_scales(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    require_positive(name, tensor_name, tensor)
    if not tensor.is_meta:
        require_none(tensor > LARGEST_SCALE, name, tensor_name, tensor, f"scales above {LARGEST_SCALE:g}")


def zeros(shape: tuple[int, ...], device: torch.device, **options: Any) -> Int4Int8Parts:
    """The parts on disk of a weight ``[out, in]`` whose values are all 0."""
    *outer, in_features = shape
    return Int4Int8Parts(
        *int4.zeros((*outer, in_features - OUTLIERS), device)[:2],
        torch.zeros(*outer, OUTLIERS, dtype=torch.int8, device=device),
        torch.ones(*outer, dtype=torch.float16, device=device),
    )


FORMAT = Format(
    word="int4_int8",
    written="int4-int8",
    title="int4 with int8 outliers",
    weight=Int4Int8Weight,
    zeros=zeros,
    value_checks={
        "scale": require_positive, "outlier": _require_codes, "outlier_scale": _require_outlier_scales,
    },
    group=lambda **options: GROUP,
    require_group=require_inputs,
    bits_per_weight=lambda in_features=4096, **options: 4.125 + 512 / in_features,
    families=int4.FORMAT.families,
    bit_choices=int4.FORMAT.bit_choices,
    weights_called="4-bit weights",
    remedy=(
        "quantize it with `mlspec quantize --method atom --format int4-int8`, or load it with from_pretrained(..., "
        "quantization_config=hf_mlspec.MLSpecConfig(format='int4-int8'))"
    ),
    level_examples=("w4a8", "w4a4"),
    stays_whole=True,
)  # fmt: skip
