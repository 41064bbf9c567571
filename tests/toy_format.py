"""A weight format in one file: 6-bit codes in groups of 32. docs/guide/add_a_format.md goes through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_mlspec.formats import CastWord, Format, PackedWeight, register, unregister
from hf_mlspec.formats.damage import require_positive
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.packed_formats import Packing, register_packing, unregister_packing
from hf_mlspec.precision import Bits, Family

GROUP, LARGEST, ZERO = 32, 31, 32  # value = (code - 32) * scale, codes 1..63
SMALLEST_SCALE = 2.0**-24  # float16's smallest


class Toy6Parts(NamedTuple):
    """What is on disk: X.weight_codes and X.weight_scale, X being the module's name."""

    codes: Tensor  # uint8 [..., out, in], a byte each
    scale: Tensor  # float16 [..., out, in / 32]


@dataclass(frozen=True)
class Toy6Weight(PackedWeight):
    """One layer's weight, as saved."""

    PARTS = Toy6Parts
    weight_codes: Tensor
    weight_scale: Tensor
    name: str = "weight"

    @classmethod
    def from_dense(cls, weight: Tensor, name: str = "weight") -> Toy6Weight:
        """Quantize float ``[out, in]``; ValueError naming the tensor for a group that float16 has no scale for."""
        groups = weight.float().unflatten(-1, (-1, GROUP))
        scale = (groups.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE).half()
        if not scale.isfinite().all():
            raise ValueError(f"{name}: a group holds NaN, Inf or a number above {LARGEST * 65504}: repair it")
        steps = (groups / scale.float().unsqueeze(-1)).round().clamp(-LARGEST, LARGEST)
        return cls((steps + ZERO).to(torch.uint8).flatten(-2), scale, name)

    @property
    def out_features(self) -> int:
        return self.weight_codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight_codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[out, in]`` in ``dtype``."""
        steps = (self.weight_codes.float() - ZERO).unflatten(-1, (-1, GROUP))
        return (steps * self.weight_scale.float().unsqueeze(-1)).flatten(-2).to(dtype)

    def validate(self, out_features: int | None = None, in_features: int | None = None) -> Toy6Weight:
        """Itself, or the error that names what is wrong."""
        shape = out_features or self.out_features, in_features or self.in_features
        self.require_like(zeros(shape, torch.device("meta")), FORMAT.title)
        require_positive(self.name, "weight_scale", self.weight_scale)
        return self


def zeros(shape: tuple[int, ...], device: torch.device, **options: Any) -> Toy6Parts:
    """The parts of a weight ``[..., out, in]`` of zeros."""
    *outer, in_features = shape
    codes = torch.full(shape, ZERO, dtype=torch.uint8, device=device)
    return Toy6Parts(codes, torch.ones(*outer, in_features // GROUP, dtype=torch.float16, device=device))


FORMAT = Format(
    word="toy6",
    title="toy6",
    weight=Toy6Weight,
    zeros=zeros,
    value_checks={"scale": require_positive},
    group=lambda **options: GROUP,
    bits_per_weight=lambda **options: 8 + 16 / GROUP,
    families=(Family("toy6", ((6, 16),), {"toy6": 6}, examples=("toy6",)),),
    bit_choices=lambda stored: (Bits(6, 16),),
    weights_called="6-bit weights",
    remedy="load it with from_pretrained(..., quantization_config=hf_mlspec.MLSpecConfig(format='toy6'))",
    casts=(CastWord("toy6"),),
    experts=True,
)


class Toy6Linear(PackedLinear):
    """``y = x W^T + b`` with W in toy6. No kernel multiplies it, so it is dequantized for every product."""

    format = "toy6"


def register_toy() -> None:
    """Make it known, as importing it would do in the package."""
    register(FORMAT)
    register_packing(Packing(Toy6Linear))


def unregister_toy() -> None:
    """Make it unknown again."""
    unregister_packing("toy6")
    unregister("toy6")
