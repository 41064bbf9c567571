"""How does a decoder on a device call a linear: a dense one, or one whose weight is packed?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ops
from ..formats import Parts
from ..precision import Bits
from .linear import Int4Linear
from .nested import NestedLinear
from .packed import PackedLinear
from .planes import PlanesLinear as BitPlaneLinear
from .switch import filled


class DenseLinear:
    """``weight`` ``[out, in]``, bfloat16 or float32, ``bias`` float32 ``[out]`` or None."""

    __slots__ = ("bias", "multiply", "weight")
    extra_bytes = 0

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.multiply = ops.bf16_linear if weight.dtype == torch.bfloat16 else ops.f32_linear

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]``; bits mean nothing to a dense weight."""
        return self.multiply(x, self.weight, self.bias)


class PackedDeviceLinear:
    """4-bit tiles of ``ops.prepack_*``; own: what the modules' switch said when it was read."""

    __slots__ = ("bias", "dequantize", "extra_bytes", "group_size", "out_features", "own", "tiles")

    def __init__(self, module: PackedLinear, tiles: Parts, out_features: int, bias: Tensor | None):
        self.tiles, self.out_features, self.bias, self.extra_bytes = tiles, out_features, bias, 0
        self.own = module.switch.bits
        self.group_size = module.group_size if isinstance(module, Int4Linear) else None  # None: MXFP4
        self.dequantize = module.switch.multiply == "dequant"

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` at 16, 8 or 4 activation bits, 0: the switch's."""
        width = bits.activation or self.own.activation
        if self.group_size is None:
            return ops.mxfp4_linear(x, *self.tiles, self.out_features, self.bias, width)
        if width == 16 and self.dequantize:
            return ops.bf16_linear(x, ops.int4_dequantize(*self.tiles, self.out_features, self.group_size), self.bias)
        return ops.int4_linear(
            x, *self.tiles, self.out_features, self.bias, group_size=self.group_size, activation_bits=width
        )


class NestedDeviceLinear:
    """Tiles of ``ops.prepack_nested``, exact or as the draft.

    drafts: what the draft multiplies, (tiles, codebook, out_features, bias) of all modules, or where their codebooks
    differ of each one.
    """

    __slots__ = ("bias", "drafts", "escapes", "extra_bytes", "out_features", "own", "tiles")

    def __init__(self, module: NestedLinear, tiles: Parts, out_features: int, bias: Tensor | None):
        draft, exponents, low, _, codebook, escape_rows, escape_weight = tiles
        self.tiles, self.out_features, self.bias, self.extra_bytes = (draft, exponents, low), out_features, bias, 0
        self.escapes = {"escape_rows": escape_rows, "escape_weight": escape_weight}
        self.drafts = [(self.tiles, codebook, out_features, bias)]
        self.own = module.switch.bits

    def draft_apart(self, modules: Sequence[NestedLinear]) -> None:
        """Each module's draft by itself, from the tiles that it holds: their codebooks differ."""
        biases = [None] * len(modules) if self.bias is None else self.bias.split([m.out_features for m in modules])
        self.drafts = []
        for module, bias in zip(modules, biases, strict=True):
            draft, exponents, low, _, codebook, _, _ = module.prepack_().parts("weight")
            self.drafts.append(((draft, exponents, low), codebook, module.out_features, bias))

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` at (16, 16), (4, 16) or (4, 8) bits, 0: the switch's."""
        weight_bits, width = filled(bits, self.own)
        if weight_bits == 16:
            how = {"weight_bits": 16, "activation_bits": width, **self.escapes}
            return ops.nested_linear(x, *self.tiles, self.drafts[0][1], self.out_features, self.bias, **how)
        parts = [
            ops.nested_linear(x, *tiles, codebook, count, bias, weight_bits=weight_bits, activation_bits=width)
            for tiles, codebook, count, bias in self.drafts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class PlanesDeviceLinear:
    """Tiles of ``ops.prepack_planes``, of which a call reads the first few."""

    __slots__ = ("bias", "extra_bytes", "how", "out_features", "own", "tiles")

    def __init__(self, module: BitPlaneLinear, tiles: Parts, out_features: int, bias: Tensor | None):
        self.tiles, self.out_features, self.bias, self.extra_bytes = tiles[:2], out_features, bias, 0
        self.how = {"group_size": module.group_size, "zero_doubled": module.zero_doubled}
        self.own = module.switch.bits

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` with as many planes as bits.weight says, 0: the switch's."""
        count = bits.weight or self.own.weight
        return ops.bitplane_linear(x, *self.tiles, self.out_features, self.bias, **self.how, num_planes=count)


DeviceLinear = DenseLinear | PackedDeviceLinear | NestedDeviceLinear | PlanesDeviceLinear
OF_FORMAT = {
    "mxfp4": PackedDeviceLinear,
    "int4": PackedDeviceLinear,
    "nested": NestedDeviceLinear,
    "planes": PlanesDeviceLinear,
}
