"""What replaces nn.Linear? Layers that call ops/, on a weight of a few bits or on the dense one as it is."""

from __future__ import annotations

import threading

import torch
from torch import nn

from .. import ops
from ..formats import mxfp4
from ..formats.weights import MXFP4_TENSORS, Mxfp4Weight
from ..ops.reference import sliced_linear

ACTIVATION_BITS = (16, 8)
_changing_layout = threading.Lock()


class Mxfp4Linear(nn.Module):
    """``y = x W^T + b`` with W in MXFP4, in one copy of 4.25 bits a weight.

    Its two uint8 parameters without gradient, which ``.half()`` and ``.to(dtype)`` leave alone, have one of two
    layouts:

        parameter       on disk, in state_dict()    in tiles, from the first forward on (ops/tiles.py)
        weight_packed   [out, in / 2]               [ceil(out / 16), in / 32, 256], also named weight_tiles
        weight_scale    [out, in / 32]              [ceil(out / 16), in / 32, 16], also named scale_tiles

    A change of layout exchanges the data of the very Parameter objects, so that all views of a model that share them
    (early_exit) change together. activation_bits 16: x is rounded to bfloat16; 8: to int8, a scale per row and block.
    """

    def __init__(
        self, weight: Mxfp4Weight, bias: nn.Parameter | None = None, activation_bits: int = ACTIVATION_BITS[0]
    ) -> None:
        """Takes over the tensors of ``weight`` and the very ``bias`` object; ValueError when they do not fit, or for
        other activation_bits."""
        super().__init__()
        weight.validate()
        if bias is not None and list(bias.shape) != [weight.out_features]:
            raise ValueError(
                f"{weight.name}: bias has shape {list(bias.shape)}, the weight {weight.out_features} rows"
            )
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.activation_bits = require_activation_bits(activation_bits)
        self.weight_packed = nn.Parameter(weight.weight_packed, requires_grad=False)
        self.weight_scale = nn.Parameter(weight.weight_scale, requires_grad=False)
        self.register_parameter("bias", bias)
        self.register_buffer("weight_dense", None, persistent=False)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, rule: str = "ocp_floor", name: str = "weight", activation_bits: int = 16
    ) -> Mxfp4Linear:
        """Quantize ``linear.weight``; the bias is shared. ValueError for NaN, Inf or in_features no multiple of 32."""
        layer = cls(Mxfp4Weight.from_dense(linear.weight.detach(), rule, name), linear.bias, activation_bits)
        return layer.train(linear.training)

    @classmethod
    def empty(cls, linear: nn.Linear, name: str = "weight", activation_bits: int = 16) -> Mxfp4Linear:
        """The shape of ``linear`` with codes of 0 on its device (meta while a checkpoint loads)."""
        if linear.in_features % mxfp4.BLOCK:
            raise ValueError(f"{name}: in_features is {linear.in_features}, MXFP4 needs a multiple of {mxfp4.BLOCK}")
        new = linear.weight.new_zeros
        packed = new(linear.out_features, linear.in_features // 2, dtype=torch.uint8)
        scale = new(linear.out_features, linear.in_features // mxfp4.BLOCK, dtype=torch.uint8)
        return cls(Mxfp4Weight(packed, scale, name), linear.bias, activation_bits)

    @property
    def is_prepacked(self) -> bool:
        """Whether the parameters are in tiles."""
        return self.weight_packed.dim() == 3

    @property
    def weight_tiles(self) -> nn.Parameter:
        """uint8 ``[ceil(out / 16), in / 32, 256]``; RuntimeError before ``prepack_()``."""
        self._require_prepacked()
        return self.weight_packed

    @property
    def scale_tiles(self) -> nn.Parameter:
        """uint8 ``[ceil(out / 16), in / 32, 16]``; RuntimeError before ``prepack_()``."""
        self._require_prepacked()
        return self.weight_scale

    @torch.compiler.disable
    def prepack_(self) -> Mxfp4Linear:
        """Parameters in tiles, as the kernels read them. A second call changes nothing."""
        with _changing_layout, torch.inference_mode(False):
            if not self.is_prepacked:
                self._hold(*ops.prepack_mxfp4(self.weight_packed.data, self.weight_scale.data))
        return self

    def unprepack_(self) -> Mxfp4Linear:
        """Parameters as on disk. A second call changes nothing."""
        with _changing_layout, torch.inference_mode(False):
            if self.is_prepacked:
                weight = self.packed_weight()
                self._hold(weight.weight_packed, weight.weight_scale)
        return self

    def packed_weight(self) -> Mxfp4Weight:
        """The weight as on disk: the parameters' own memory, or a copy of them where they are in tiles."""
        packed, scale = self.weight_packed.data, self.weight_scale.data
        if self.is_prepacked:
            packed, scale = ops.unprepack_mxfp4(packed, scale, self.out_features)
        return Mxfp4Weight(packed, scale)

    def _hold(self, packed: torch.Tensor, scale: torch.Tensor) -> None:
        self.weight_scale.data = scale
        self.weight_packed.data = packed  # last: other threads look at it

    def _require_prepacked(self) -> None:
        if not self.is_prepacked:
            raise RuntimeError("Mxfp4Linear: the weight is in the layout on disk, call prepack_() first")

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_prepacked:
            weight = self.packed_weight()
            destination.update({prefix + name: getattr(weight, name) for name in MXFP4_TENSORS})

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.unprepack_()
        super()._load_from_state_dict(*args, **kwargs)

    def materialize(self, dtype: torch.dtype) -> Mxfp4Linear:
        """Keep W in ``dtype`` next to the codes: for machines without kernels, the memory of a dense layer for its
        speed.

        x of that dtype is then multiplied as it is, whatever activation_bits; for bfloat16 with the bits of the
        16-bit reference path. Calls with another dtype of x, and checkpoints, use the codes.
        """
        self.weight_dense = self.dequantized(dtype)
        return self

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W as ``[out, in]`` in ``dtype``."""
        return self.packed_weight().dequantize(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        if self.weight_dense is not None and self.weight_dense.dtype == x.dtype:
            return sliced_linear(x, self.weight_dense, self.bias)
        if not self.is_prepacked:
            self.prepack_()
        return ops.mxfp4_linear(
            x, self.weight_packed, self.weight_scale, self.out_features, self.bias, self.activation_bits
        )

    def extra_repr(self) -> str:
        dense = "" if self.weight_dense is None else f", materialized={self.weight_dense.dtype}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation_bits={self.activation_bits}{dense}"
        )


class KernelLinear(nn.Linear):
    """An nn.Linear served by the compiled kernels; what `prepare` makes of the linears of an unknown architecture.

    Where they do not serve (off the CPU, a dtype other than bfloat16 and float32, a weight that is not contiguous,
    under autograd or autocast) it is its parent.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        weight = self.weight
        linear = _DENSE_OPS.get(weight.dtype)
        learns = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
        fits = linear is not None and x.dtype == weight.dtype and weight.is_cpu and weight.is_contiguous()
        if not fits or learns or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return linear(x, weight, self.bias)


_DENSE_OPS = {torch.bfloat16: ops.bf16_linear, torch.float32: ops.f32_linear}


def is_dense(module: nn.Module) -> bool:
    """Whether a module is nn.Linear, prepared or not; another subclass computes something else."""
    return type(module) in (nn.Linear, KernelLinear)


def require_activation_bits(activation_bits: int | None, device: torch.device | None = None) -> int:
    """``activation_bits``, or for None what suits ``device``: 8 on a CPU, else 16. ValueError for other widths."""
    if activation_bits is None and device is not None:
        return 8 if device.type == "cpu" else 16
    if activation_bits not in ACTIVATION_BITS:
        raise ValueError(
            f"activation_bits is {activation_bits!r}: choose 16 (bfloat16) or 8 (int8, one scale per block of 32)"
        )
    return activation_bits
