"""What replaces nn.Linear? Layers that hold their weight in a few bits and call ops/."""

from __future__ import annotations

import torch
from torch import nn

from .. import ops
from ..formats import mxfp4
from ..formats.weights import Mxfp4Weight
from ..ops.reference import sliced_linear


class Mxfp4Linear(nn.Module):
    """``y = x W^T + b`` with W in MXFP4: ``weight_packed`` uint8 ``[out, in / 2]``, ``weight_scale`` uint8 ``[out, in
    / 32]``.

    Both are uint8 parameters without gradient, so ``.half()`` and ``.to(dtype)`` leave them alone. There is no wide
    copy of W, unless ``materialize()`` asks for one.
    """

    def __init__(self, weight: Mxfp4Weight, bias: nn.Parameter | None = None) -> None:
        """Takes over the tensors of ``weight`` and the very ``bias`` object; ValueError when they do not fit."""
        super().__init__()
        weight.validate()
        if bias is not None and list(bias.shape) != [weight.out_features]:
            raise ValueError(
                f"{weight.name}: bias has shape {list(bias.shape)}, the weight {weight.out_features} rows"
            )
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.weight_packed = nn.Parameter(weight.weight_packed, requires_grad=False)
        self.weight_scale = nn.Parameter(weight.weight_scale, requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_buffer("weight_dense", None, persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, rule: str = "ocp_floor", name: str = "weight") -> Mxfp4Linear:
        """Quantize ``linear.weight``; the bias is shared. ValueError for NaN, Inf or in_features no multiple of 32."""
        layer = cls(Mxfp4Weight.from_dense(linear.weight.detach(), rule, name), linear.bias)
        return layer.train(linear.training)

    @classmethod
    def empty(cls, linear: nn.Linear, name: str = "weight") -> Mxfp4Linear:
        """The shape of ``linear`` with uninitialised codes on its device (meta while a checkpoint loads)."""
        if linear.in_features % mxfp4.BLOCK:
            raise ValueError(f"{name}: in_features is {linear.in_features}, MXFP4 needs a multiple of {mxfp4.BLOCK}")
        new = linear.weight.new_zeros
        packed = new(linear.out_features, linear.in_features // 2, dtype=torch.uint8)
        scale = new(linear.out_features, linear.in_features // mxfp4.BLOCK, dtype=torch.uint8)
        return cls(Mxfp4Weight(packed, scale, name), linear.bias)

    def materialize(self, dtype: torch.dtype) -> Mxfp4Linear:
        """Keep W in ``dtype`` next to the codes: for machines without kernels, the memory of a dense layer for its
        speed.

        Gives the bits of the reference path. Calls with another dtype of x, and checkpoints, use the codes.
        """
        self.weight_dense = self.dequantized(dtype)
        return self

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W as ``[out, in]`` in ``dtype``."""
        return mxfp4.dequantize(self.weight_packed.detach(), self.weight_scale.detach(), dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        if self.weight_dense is not None and self.weight_dense.dtype == x.dtype:
            return sliced_linear(x, self.weight_dense, self.bias)
        return ops.mxfp4_linear(x, self.weight_packed, self.weight_scale, self.bias)

    def extra_repr(self) -> str:
        dense = "" if self.weight_dense is None else f", materialized={self.weight_dense.dtype}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{dense}"
