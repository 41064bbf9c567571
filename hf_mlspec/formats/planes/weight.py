"""What is saved of a weight in bit-planes, and is it whole? Its tensors as one object.

    X.weight_planes  uint8    [B, out, in / 8]   bit B - 1 - p of the codes; bit i of byte j is element 8 j + i
    X.weight_scale   float16  [out, in / group]  step of each group of 32, 64 or 128 along ``in``, above 0
    X.weight_zero_doubled     int32  [1]         twice the code that means 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..damage import require_positive, require_size
from ..weight import PlaneRows
from . import codes

_DTYPES = (torch.uint8, torch.float16, torch.int32)


class PlanesParts(NamedTuple):
    """As on disk; in tiles the planes and the scales are those of their device, and the zero is the same."""

    planes: Tensor
    scale: Tensor
    zero_doubled: Tensor


@dataclass(frozen=True)
class PlanesWeight(PlaneRows):
    """One linear layer's weight in bit-planes, as saved. ``name`` is only used in messages."""

    PARTS = PlanesParts
    weight_planes: Tensor
    weight_scale: Tensor
    weight_zero_doubled: Tensor
    name: str = "weight"

    @classmethod
    def from_dense(
        cls, weight: Tensor, num_planes: int | str = 8, group_size: int | None = None, name: str = "weight"
    ) -> PlanesWeight:
        """Quantize float ``[out, in]`` to 1..8 planes, or to "int3", "int2" or "ternary"; groups of 128, those of the
        words of 64. TypeError and ValueError naming the tensor, as codes.quantize."""
        try:
            parts = codes.quantize(weight, num_planes, group_size or codes.default_group(num_planes))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        zero = torch.tensor([parts.zero_doubled], dtype=torch.int32, device=weight.device)
        return cls(parts.planes, parts.scale, zero, name)

    @property
    def num_planes(self) -> int:
        return self.weight_planes.shape[0]

    @property
    def group_size(self) -> int:
        """Elements that share a scale: 32, 64 or 128."""
        return self.in_features // self.weight_scale.shape[1]

    @property
    def zero_doubled(self) -> int:
        """Twice the code that means 0. Reads the tensor: call it once, not for every product."""
        return int(self.weight_zero_doubled[0])

    def dequantize(self, dtype: torch.dtype = torch.float32, num_planes: int | None = None) -> Tensor:
        """``[out, in]`` in ``dtype``, as the first ``num_planes`` planes have it (None: all)."""
        return codes.dequantize(self.weight_planes, self.weight_scale, self.zero_doubled, num_planes, dtype)

    def validate(
        self, out_features: int | None = None, in_features: int | None = None, group_size: int | None = None
    ) -> PlanesWeight:
        """Itself, or one specific error: TypeError for a dtype; ValueError for a shape, a truncated tensor, a scale
        that is NaN, Inf, zero or negative, or a ``zero_doubled`` beyond the codes. Without ``group_size`` the shapes
        tell it."""
        self.require_dtypes(_DTYPES, "bit-planes")
        planes, scale = list(self.weight_planes.shape), list(self.weight_scale.shape)
        if len(planes) != 3 or len(scale) != 2 or not scale[1] or not 1 <= planes[0] <= codes.MAX_PLANES:
            raise ValueError(
                f"{self.name}: weight_planes has shape {planes} and weight_scale {scale}, expected [1 to "
                f"{codes.MAX_PLANES} planes, out, in / 8] and [out, in / group]"
            )
        out, size = out_features or planes[1], in_features or planes[2] * 8
        require_size(self.name, "weight_planes", self.weight_planes, [planes[0], out, size // 8])
        group = group_size or size // scale[1]
        if group not in codes.GROUP_SIZES or size % group:
            raise ValueError(
                f"{self.name}: {scale[1]} scales a row for in_features {size}: bit-planes need in_features / 32, / 64 "
                "or / 128 of them"
            )
        require_size(self.name, "weight_scale", self.weight_scale, [out, size // group])
        require_size(self.name, "weight_zero_doubled", self.weight_zero_doubled, [1])
        require_positive(self.name, "weight_scale", self.weight_scale)
        self._check_zero()
        return self

    def _check_zero(self) -> None:
        if self.weight_zero_doubled.is_meta:
            return
        least, most = codes.zeros_doubled(self.num_planes)
        if not least <= self.zero_doubled <= most:
            raise ValueError(
                f"{self.name}: weight_zero_doubled is {self.zero_doubled}, of {self.num_planes} planes it is "
                f"{least}..{most}: the checkpoint is damaged"
            )
