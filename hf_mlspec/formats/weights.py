"""What is saved? Tensor names, dtypes and shapes of every weight format.

    format   tensor           dtype   shape             meaning
    mxfp4    X.weight_packed  uint8   [out, in / 2]     two E2M1 codes a byte, low nibble first
             X.weight_scale   uint8   [out, in / 32]    E8M0 byte of each block of 32 along ``in``
    int4     X.weight_packed  uint8   [out, in / 2]     two codes 0..15 a byte, low nibble first
             X.weight_scale   float16 [out, in / group] step of each group of 32, 64 or 128 along ``in``, above 0
             X.weight_zero    uint8   [out, in / group] the code that means 0; absent when it is 8 everywhere
    nested   X.weight_packed  uint8   [out, in / 2]     sign and index of the draft, low nibble first
             X.weight_scale   uint8   [out, in / 32]    largest exponent of each block of 32, 31 to 254
             X.weight_low     uint8   [out, in]         low 8 bits of the 12-bit fields
             X.weight_high    uint8   [out, in / 2]     their high 4 bits, low nibble first
             X.weight_codebook        uint8    [8]      the draft's magnitudes, ascending, 0..63
             X.weight_escape_index    int64    [n]      row * in + column of weights without a field, ascending
             X.weight_escape_value    bfloat16 [n]      and what they are; both absent where n is 0
    planes   X.weight_planes  uint8   [B, out, in / 8]  bit B - 1 - p of the codes; bit i of byte j is element 8 j + i
             X.weight_scale   float16 [out, in / group] step of each group of 32, 64 or 128 along ``in``, above 0
             X.weight_zero_doubled    int32    [1]      twice the code that means 0
    all      X.bias           any     [out]             unchanged, if there is one

X is the module's name. The names are those compressed-tensors uses ("mxfp4-pack-quantized"); no kernel's private
layout is ever on disk. A checkpoint also holds one guard byte (integration/quantizer.py, docs/formats.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import int4, mxfp4
from .bitplane_weight import BITPLANE_TENSORS, BitPlaneWeight
from .damage import require_dtype, require_size, require_values
from .nested_weight import ESCAPE_TENSORS, NESTED_TENSORS, NestedWeight

__all__ = [
    "BITPLANE_TENSORS",
    "ESCAPE_TENSORS",
    "INT4_TENSORS",
    "MXFP4_TENSORS",
    "NESTED_TENSORS",
    "BitPlaneWeight",
    "Int4Weight",
    "Mxfp4Weight",
    "NestedWeight",
    "require_values",
]

MXFP4_TENSORS = ("weight_packed", "weight_scale")
INT4_TENSORS = ("weight_packed", "weight_scale", "weight_zero")


@dataclass(frozen=True)
class Mxfp4Weight:
    """One linear layer's MXFP4 weight, as saved. ``name`` is only used in messages."""

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    name: str = "weight"

    @classmethod
    def from_dense(cls, weight: torch.Tensor, rule: str = "ocp_floor", name: str = "weight") -> Mxfp4Weight:
        """Quantize ``[out, in]`` floats; ValueError naming the tensor when it holds NaN or Inf."""
        packed, scales = mxfp4.quantize(weight, rule)
        bad = int((scales == mxfp4.NAN_SCALE).sum())
        if bad:
            raise ValueError(
                f"{name}: {bad} of its {scales.numel()} blocks of {mxfp4.BLOCK} hold NaN or Inf, which MXFP4 cannot "
                "draft with: "
                "repair the checkpoint or exclude this layer"
            )
        return cls(packed, scales, name)

    @property
    def out_features(self) -> int:
        return self.weight_packed.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight_packed.shape[1] * 2

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[out, in]`` in ``dtype``."""
        return mxfp4.dequantize(self.weight_packed, self.weight_scale, dtype)

    def validate(self, out_features: int | None = None, in_features: int | None = None) -> Mxfp4Weight:
        """Itself, or one specific error: TypeError for a dtype, ValueError for a shape, a truncated tensor or a NaN
        scale."""
        self._check_dtypes()
        packed, scale = list(self.weight_packed.shape), list(self.weight_scale.shape)
        if len(packed) != 2 or len(scale) != 2:
            raise ValueError(
                f"{self.name}: weight_packed has shape {packed} and weight_scale {scale}, both must have two axes, "
                f"[out, in / 2] and [out, in / {mxfp4.BLOCK}]"
            )
        expected = [out_features or packed[0], (in_features or packed[1] * 2) // 2]
        require_size(self.name, "weight_packed", self.weight_packed, expected)
        require_size(self.name, "weight_scale", self.weight_scale, [packed[0], packed[1] // (mxfp4.BLOCK // 2)])
        if packed[1] % (mxfp4.BLOCK // 2):
            raise ValueError(f"{self.name}: in_features is {packed[1] * 2}, MXFP4 needs a multiple of {mxfp4.BLOCK}")
        require_values(self.name, "weight_scale", self.weight_scale)
        return self

    def _check_dtypes(self) -> None:
        for tensor_name in MXFP4_TENSORS:
            require_dtype(self.name, tensor_name, getattr(self, tensor_name), torch.uint8, "MXFP4")


@dataclass(frozen=True)
class Int4Weight:
    """One linear layer's int4 weight, as saved. ``weight_zero`` None: symmetric. ``name`` is only used in messages."""

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_zero: torch.Tensor | None = None
    name: str = "weight"

    @classmethod
    def from_dense(
        cls, weight: torch.Tensor, group_size: int = 128, symmetric: bool = True, name: str = "weight"
    ) -> Int4Weight:
        """Quantize ``[out, in]`` floats; ValueError naming the tensor and the row for NaN, Inf or a scale beyond
        float16."""
        try:
            return cls(*int4.quantize(weight, group_size, symmetric), name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    @property
    def out_features(self) -> int:
        return self.weight_packed.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight_packed.shape[1] * 2

    @property
    def group_size(self) -> int:
        """Elements that share a scale: 32, 64 or 128."""
        return self.in_features // self.weight_scale.shape[1]

    @property
    def symmetric(self) -> bool:
        return self.weight_zero is None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[out, in]`` in ``dtype``."""
        return int4.dequantize(self.weight_packed, self.weight_scale, self.weight_zero, dtype)

    def validate(
        self, out_features: int | None = None, in_features: int | None = None, group_size: int | None = None
    ) -> Int4Weight:
        """Itself, or one specific error: TypeError for a dtype, ValueError for a shape, a truncated tensor, a scale
        that is NaN, Inf, zero or negative, or a zero point beyond 15. Without ``group_size`` the shapes tell it."""
        self._check_dtypes()
        packed, scale = list(self.weight_packed.shape), list(self.weight_scale.shape)
        if len(packed) != 2 or len(scale) != 2 or not scale[1]:
            raise ValueError(
                f"{self.name}: weight_packed has shape {packed} and weight_scale {scale}, both must have two axes, "
                "[out, in / 2] and [out, in / group]"
            )
        expected = [out_features or packed[0], (in_features or packed[1] * 2) // 2]
        require_size(self.name, "weight_packed", self.weight_packed, expected)
        group = group_size or packed[1] * 2 // scale[1]
        if group not in int4.GROUP_SIZES or packed[1] * 2 % group:
            raise ValueError(
                f"{self.name}: {scale[1]} scales a row for in_features {packed[1] * 2}: int4 needs in_features / 32, "
                "/ 64 or / 128 of them"
            )
        require_size(self.name, "weight_scale", self.weight_scale, [packed[0], packed[1] * 2 // group])
        if self.weight_zero is not None:
            require_size(self.name, "weight_zero", self.weight_zero, scale)
        require_values(self.name, "weight_scale", self.weight_scale)
        if self.weight_zero is not None:
            require_values(self.name, "weight_zero", self.weight_zero)
        return self

    def _check_dtypes(self) -> None:
        for tensor_name, expected in zip(INT4_TENSORS, (torch.uint8, torch.float16, torch.uint8), strict=True):
            if (tensor := getattr(self, tensor_name)) is not None:
                require_dtype(self.name, tensor_name, tensor, expected, "int4")
