"""What replaces nn.Linear? Layers that call ops/, on a weight of 4 bits or on the dense one as it is."""

from __future__ import annotations

import torch
from torch import nn

from .. import ops
from ..formats import Int4Weight
from ..formats.int4 import Int4Parts
from ..formats.mxfp4 import Mxfp4Parts
from ..ops.cuda_library import serves
from ..ops.int4 import int4_group_size
from .packed import PackedLinear
from .packed_formats import Packing, register_packing
from .switch import PrecisionSwitch


class Mxfp4Linear(PackedLinear):
    """``y = x W^T + b`` with W in MXFP4: 4.25 bits a weight, two uint8 parameters without gradient.

        parameter       on disk, in state_dict()    in tiles, from the first forward on (ops/tiles.py)
        weight_packed   [out, in / 2]               [ceil(out / 16), in / 32, 256], also named weight_tiles
        weight_scale    [out, in / 32]              [ceil(out / 16), in / 32, 16], also named scale_tiles

    On a GPU with kernels tiles have other shapes: ops/tiles_cuda.py.
    At 16 activation bits x is rounded to bfloat16; at 8 to int8, a scale per row and block. Option: ``rule``.
    """

    format = "mxfp4"


class Int4Linear(PackedLinear):
    """``y = x W^T + b`` with W in groups of 32, 64 or 128 int4 codes: 4.13 to 4.75 bits a weight.

        parameter       dtype     on disk, in state_dict()    in tiles, from the first forward on (ops/tiles.py)
        weight_packed   uint8     [out, in / 2]               [ceil(out / 16), in / 32, 256], also named weight_tiles
        weight_scale    float16   [out, in / group]           [ceil(out / 16), in / group, 16], also named scale_tiles
        weight_zero     uint8     as weight_scale, or None    as scale_tiles, also named zero_tiles

    On a GPU with kernels tiles have other shapes: ops/tiles_cuda.py.
    At 16 activation bits x is rounded to bfloat16; at 8 or 4 to integers, a scale per row and group of the weight.
    Options: ``group_size``, ``symmetric``.
    """

    format = "int4"

    def __init__(
        self, weight: Int4Weight, bias: nn.Parameter | None = None, switch: PrecisionSwitch | None = None
    ) -> None:
        super().__init__(weight, bias, switch)
        self.group_size, self.symmetric = weight.group_size, weight.symmetric

    @property
    def zero_tiles(self) -> nn.Parameter | None:
        """uint8, as ``weight_tiles``, None when symmetric; RuntimeError before ``prepack_()``."""
        return self._tiles("zero")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}, symmetric={self.symmetric}"


def _multiply_mxfp4(
    x: torch.Tensor, tiles: Mxfp4Parts, rows: int, bias: torch.Tensor | None, switch: PrecisionSwitch
) -> torch.Tensor:
    return ops.mxfp4_linear(x, *tiles, rows, bias, switch.activation_bits)


def _multiply_int4(
    x: torch.Tensor, tiles: Int4Parts, rows: int, bias: torch.Tensor | None, switch: PrecisionSwitch
) -> torch.Tensor:
    bits = switch.activation_bits
    group_size = int4_group_size(*tiles)
    if bits == 16 and switch.multiply == "dequant":
        return ops.bf16_linear(x, ops.int4_dequantize(*tiles, rows, group_size), bias)
    how = {"group_size": group_size, "activation_bits": bits, "activation_clip": switch.activation_clip}
    return ops.int4_linear(x, *tiles, rows, bias, **how)


register_packing(Packing(Mxfp4Linear, ops.prepack_mxfp4, ops.unprepack_mxfp4, _multiply_mxfp4))
register_packing(Packing(Int4Linear, ops.prepack_int4, ops.unprepack_int4, _multiply_int4))


class KernelLinear(nn.Linear):
    """An nn.Linear served by the compiled kernels; what `prepare` makes of the linears of an unknown architecture.

    Where they do not serve (a GPU without kernels; a dtype other than bfloat16 and, on the CPU, float32; a weight that
    is not contiguous; under autograd or autocast) it is its parent.
    """

    @classmethod
    def over(cls, linear: nn.Linear) -> KernelLinear:
        """One that takes the place of ``linear``: it shares its parameters and hooks, and keeps it for `given_up`."""
        own = cls.__new__(cls)
        vars(own).update(vars(linear), replaced=(linear,))  # in a tuple: a module among modules would be saved twice
        return own

    def given_up(self) -> nn.Linear:
        """The linear whose place this one took, as it would be now; where there was none, a new one."""
        state = dict(vars(self))
        (linear,) = state.pop("replaced", None) or (nn.Linear.__new__(nn.Linear),)
        vars(linear).update(state)
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        weight = self.weight
        linear = _DENSE_OPS.get((weight.device.type, weight.dtype))
        learns = torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad)
        fits = linear is not None and x.dtype == weight.dtype and weight.is_contiguous()
        if weight.is_cuda:
            fits = fits and serves(weight)
        if not fits or learns or torch.is_autocast_enabled(weight.device.type):
            return super().forward(x)
        return linear(x, weight, self.bias)


_DENSE_OPS = {
    ("cpu", torch.bfloat16): ops.bf16_linear,
    ("cpu", torch.float32): ops.f32_linear,
    ("cuda", torch.bfloat16): ops.bf16_linear,
}


_ALIKE = ("transformers.models.falcon.modeling_falcon.FalconLinear",)


def is_dense(module: nn.Module) -> bool:
    """Whether a module is nn.Linear, prepared or not, or known to compute the same; another subclass may compute
    something else."""
    kind = type(module)
    return kind in (nn.Linear, KernelLinear) or f"{kind.__module__}.{kind.__name__}" in _ALIKE


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D (GPT-2): a linear with a bias whose weight is ``[in, out]``."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D"


@torch.no_grad()
def lay_rows(linear: nn.Module) -> torch.Tensor:
    """The weight of a dense linear as ``[out, in]``, where it lies. That of a Conv1D becomes a view of one that lies
    so, with the values it had."""
    if not is_transposed(linear):
        return linear.weight
    with torch.inference_mode(False):
        if not linear.weight.detach().t().is_contiguous():
            linear.weight.data = linear.weight.detach().t().contiguous().t()
        return linear.weight.detach().t()
