"""What is saved? Tensor names, dtypes and shapes of every weight format.

    format   tensor           dtype   shape             meaning
    mxfp4    X.weight_packed  uint8   [out, in / 2]     two E2M1 codes a byte, low nibble first
             X.weight_scale   uint8   [out, in / 32]    E8M0 byte of each block of 32 along ``in``
    int4     X.weight_packed  uint8   [out, in / 2]     two codes 0..15 a byte, low nibble first
             X.weight_scale   float16 [out, in / group] step of each group of 32, 64 or 128 along ``in``
             X.weight_zero    uint8   [out, in / group] the code that means 0; absent when it is 8 everywhere
    both     X.bias           any     [out]             unchanged, if there is one

X is the module's name. The names are those compressed-tensors uses ("mxfp4-pack-quantized"); no kernel's private
layout is ever on disk. A checkpoint also holds one guard byte (integration/quantizer.py, docs/formats.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import int4, mxfp4

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
        _check_size(self.name, "weight_packed", packed, out_features or packed[0], (in_features or packed[1] * 2) // 2)
        _check_size(self.name, "weight_scale", scale, packed[0], packed[1] // (mxfp4.BLOCK // 2))
        if packed[1] % (mxfp4.BLOCK // 2):
            raise ValueError(f"{self.name}: in_features is {packed[1] * 2}, MXFP4 needs a multiple of {mxfp4.BLOCK}")
        self._check_scales()
        return self

    def _check_dtypes(self) -> None:
        for tensor_name in MXFP4_TENSORS:
            dtype = getattr(self, tensor_name).dtype
            if dtype != torch.uint8:
                raise TypeError(f"{self.name}: {tensor_name} is {dtype}, MXFP4 is saved as torch.uint8")

    def _check_scales(self) -> None:
        if self.weight_scale.is_meta:
            return
        bad = (self.weight_scale == mxfp4.NAN_SCALE).nonzero()
        if len(bad):
            row, block = bad[0].tolist()
            raise ValueError(
                f"{self.name}: weight_scale holds {len(bad)} NaN codes (255), the first at row {row}, block {block}: "
                "the checkpoint is damaged or was written from NaN weights"
            )


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
        that is NaN, Inf or negative, or a zero point beyond 15. Without ``group_size`` the shapes tell it."""
        self._check_dtypes()
        packed, scale = list(self.weight_packed.shape), list(self.weight_scale.shape)
        if len(packed) != 2 or len(scale) != 2 or not scale[1]:
            raise ValueError(
                f"{self.name}: weight_packed has shape {packed} and weight_scale {scale}, both must have two axes, "
                "[out, in / 2] and [out, in / group]"
            )
        _check_size(self.name, "weight_packed", packed, out_features or packed[0], (in_features or packed[1] * 2) // 2)
        group = group_size or packed[1] * 2 // scale[1]
        if group not in int4.GROUP_SIZES or packed[1] * 2 % group:
            raise ValueError(
                f"{self.name}: {scale[1]} scales a row for in_features {packed[1] * 2}: int4 needs in_features / 32, "
                "/ 64 or / 128 of them"
            )
        _check_size(self.name, "weight_scale", scale, packed[0], packed[1] * 2 // group)
        if self.weight_zero is not None:
            _check_size(self.name, "weight_zero", list(self.weight_zero.shape), *scale)
        self._check_values()
        return self

    def _check_dtypes(self) -> None:
        for tensor_name, expected in zip(INT4_TENSORS, (torch.uint8, torch.float16, torch.uint8), strict=True):
            tensor = getattr(self, tensor_name)
            if tensor is not None and tensor.dtype != expected:
                raise TypeError(f"{self.name}: {tensor_name} is {tensor.dtype}, int4 saves it as {expected}")

    def _check_values(self) -> None:
        if self.weight_scale.is_meta:
            return
        bad = (~(self.weight_scale.isfinite() & (self.weight_scale >= 0))).nonzero()
        if len(bad):
            row, group = bad[0].tolist()
            raise ValueError(
                f"{self.name}: weight_scale holds {len(bad)} values that are NaN, Inf or negative, the first "
                f"({self.weight_scale[row, group].item():g}) at row {row}, group {group}: the checkpoint is damaged"
            )
        beyond = [] if self.weight_zero is None else (self.weight_zero > int4.LARGEST_CODE).nonzero()
        if len(beyond):
            row, group = beyond[0].tolist()
            raise ValueError(
                f"{self.name}: weight_zero holds {len(beyond)} zero points above {int4.LARGEST_CODE}, the first "
                f"({self.weight_zero[row, group].item()}) at row {row}, group {group}: the checkpoint is damaged"
            )


def _check_size(name: str, tensor_name: str, shape: list[int], rows: int, columns: int) -> None:
    if shape == [rows, columns]:
        return
    too_small = len(shape) == 2 and shape[0] * shape[1] < rows * columns
    raise ValueError(
        f"{name}: {tensor_name} has shape {shape}, expected {[rows, columns]}: the tensor is "
        f"{'truncated' if too_small else 'of another layer'}; download or write the checkpoint again"
    )
