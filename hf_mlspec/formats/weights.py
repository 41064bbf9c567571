"""What is saved? Tensor names, dtypes and shapes of every weight format.

    format   tensor           dtype   shape             meaning
    mxfp4    X.weight_packed  uint8   [out, in / 2]     two E2M1 codes a byte, low nibble first
             X.weight_scale   uint8   [out, in / 32]    E8M0 byte of each block of 32 along ``in``
             X.bias           any     [out]             unchanged, if there is one

X is the module's name. The names are those compressed-tensors uses ("mxfp4-pack-quantized"); no kernel's private
layout is ever on disk. A checkpoint also holds one guard byte (integration/quantizer.py, docs/formats.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import mxfp4

MXFP4_TENSORS = ("weight_packed", "weight_scale")


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
        self._check_size("weight_packed", packed, out_features or packed[0], (in_features or packed[1] * 2) // 2)
        self._check_size("weight_scale", scale, packed[0], packed[1] // (mxfp4.BLOCK // 2))
        if packed[1] % (mxfp4.BLOCK // 2):
            raise ValueError(f"{self.name}: in_features is {packed[1] * 2}, MXFP4 needs a multiple of {mxfp4.BLOCK}")
        self._check_scales()
        return self

    def _check_dtypes(self) -> None:
        for tensor_name in MXFP4_TENSORS:
            dtype = getattr(self, tensor_name).dtype
            if dtype != torch.uint8:
                raise TypeError(f"{self.name}: {tensor_name} is {dtype}, MXFP4 is saved as torch.uint8")

    def _check_size(self, tensor_name: str, shape: list[int], rows: int, columns: int) -> None:
        if shape == [rows, columns]:
            return
        cause = "truncated" if shape[0] * shape[1] < rows * columns else "of another layer"
        raise ValueError(
            f"{self.name}: {tensor_name} has shape {shape}, expected {[rows, columns]}: the tensor is {cause}; "
            "download or write the checkpoint again"
        )

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
