"""What is saved? Tensor names, dtypes and shapes of every weight format.

    format   tensor           dtype   shape             meaning
    mxfp4    X.weight_packed  uint8   [out, in / 2]     two E2M1 codes a byte, low nibble first
             X.weight_scale   uint8   [out, in / 32]    E8M0 byte of each block of 32 along ``in``
    int4     X.weight_packed  uint8   [out, in / 2]     two codes 0..15 a byte, low nibble first
             X.weight_scale   float16 [out, in / group] step of each group of 32, 64 or 128 along ``in``, above 0
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
        require_values(self.name, "weight_scale", self.weight_scale)
        return self

    def _check_dtypes(self) -> None:
        for tensor_name in MXFP4_TENSORS:
            dtype = getattr(self, tensor_name).dtype
            if dtype != torch.uint8:
                raise TypeError(f"{self.name}: {tensor_name} is {dtype}, MXFP4 is saved as torch.uint8")


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
        require_values(self.name, "weight_scale", self.weight_scale)
        if self.weight_zero is not None:
            require_values(self.name, "weight_zero", self.weight_zero)
        return self

    def _check_dtypes(self) -> None:
        for tensor_name, expected in zip(INT4_TENSORS, (torch.uint8, torch.float16, torch.uint8), strict=True):
            tensor = getattr(self, tensor_name)
            if tensor is not None and tensor.dtype != expected:
                raise TypeError(f"{self.name}: {tensor_name} is {tensor.dtype}, int4 saves it as {expected}")


def require_values(name: str, tensor_name: str, tensor: torch.Tensor) -> None:
    """ValueError for numbers no quantizer writes, which mean damage: in ``<...>_scale`` of uint8 (E8M0) the NaN code,
    in one of float16 what is NaN, Inf, zero or negative, in ``<...>_zero`` what is above 15.

    Any number of axes, ``[..., out, in / group]``; a tensor of another name or on the meta device passes. The message
    names ``name``, ``tensor_name``, how many there are, and the first with its place.
    """
    if tensor.is_meta or not tensor_name.endswith(("_scale", "_zero")):
        return
    if tensor_name.endswith("_zero"):
        wrong, what = tensor > int4.LARGEST_CODE, f"zero points above {int4.LARGEST_CODE}"
    elif tensor.dtype == torch.uint8:
        wrong, what = tensor == mxfp4.NAN_SCALE, f"NaN codes ({mxfp4.NAN_SCALE})"
    else:
        wrong, what = ~(tensor.isfinite() & (tensor > 0)), "values that are NaN, Inf, zero or negative"
    if not wrong.any():
        return
    *expert, row, column = first = wrong.nonzero()[0].tolist()
    unit = "block" if tensor.dtype == torch.uint8 and tensor_name.endswith("_scale") else "group"
    place = "".join(f"expert {index}, " for index in expert) + f"row {row}, {unit} {column}"
    raise ValueError(
        f"{name}: {tensor_name} holds {int(wrong.sum())} {what}, the first ({tensor[tuple(first)].item():g}) at "
        f"{place}: the checkpoint is damaged or was written from NaN weights"
    )


def _check_size(name: str, tensor_name: str, shape: list[int], rows: int, columns: int) -> None:
    if shape == [rows, columns]:
        return
    too_small = len(shape) == 2 and shape[0] * shape[1] < rows * columns
    raise ValueError(
        f"{name}: {tensor_name} has shape {shape}, expected {[rows, columns]}: the tensor is "
        f"{'truncated' if too_small else 'of another layer'}; download or write the checkpoint again"
    )
