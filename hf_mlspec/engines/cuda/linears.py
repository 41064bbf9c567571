"""How does the CUDA decoder call a linear, dense or of 4-bit tiles, on rows or on rows that became integers?"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ...formats import Parts
from ...formats.int4_int8 import GROUP, OUTLIERS
from ...nn.int4_int8 import Int4Int8Linear
from ...nn.packed import PackedLinear
from ...ops import Codes, CodesOf
from ...precision import Bits


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


class FourBitLinear:
    """4-bit tiles of ``ops.prepack_*``; own: what the modules' switch said when it was read."""

    __slots__ = ("bias", "clip", "dequantize", "extra_bytes", "group_size", "out_features", "own", "tiles")

    def __init__(self, module: PackedLinear, tiles: Parts, out_features: int, bias: Tensor | None):
        self.tiles, self.out_features, self.bias, self.extra_bytes = tiles, out_features, bias, 0
        self.own, self.clip = module.switch.bits, module.switch.activation_clip
        self.group_size = getattr(module, "group_size", None)  # None: blocks of MXFP4
        self.dequantize = module.switch.multiply == "dequant"

    def coding(self, bits: Bits) -> CodesOf | None:
        """How its inputs are coded at these activation bits before it multiplies them; None: not outside of it."""
        width = bits.activation or self.own.activation
        return None if width == 16 or self.group_size is None else CodesOf(self.group_size, width, self.clip)

    def __call__(self, x: Tensor | Codes, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` at 16, 8 or 4 activation bits, 0: the switch's; codes are of `coding`."""
        if isinstance(x, Codes):
            how = {"group_size": self.group_size}
            return ops.int4_codes_linear(x, *self.tiles, self.out_features, self.bias, **how)
        width = bits.activation or self.own.activation
        if self.group_size is None:
            return ops.mxfp4_linear(x, *self.tiles, self.out_features, self.bias, width)
        if width == 16 and self.dequantize:
            return ops.bf16_linear(x, ops.int4_dequantize(*self.tiles, self.out_features, self.group_size), self.bias)
        how = {"group_size": self.group_size, "activation_bits": width, "activation_clip": self.clip}
        return ops.int4_linear(x, *self.tiles, self.out_features, self.bias, **how)


class OutlierLinear:
    """Tiles of ``ops.prepack_int4_int8``."""

    __slots__ = ("bias", "clip", "extra_bytes", "out_features", "own", "tiles")

    def __init__(self, module: Int4Int8Linear, tiles: Parts, out_features: int, bias: Tensor | None):
        self.tiles = tiles[:2]
        self.out_features, self.bias, self.extra_bytes, self.own = out_features, bias, 0, module.switch.bits
        self.clip = module.switch.activation_clip

    def coding(self, bits: Bits) -> CodesOf | None:
        """As of `FourBitLinear`."""
        width = bits.activation or self.own.activation
        return None if width == 16 else CodesOf(GROUP, width, self.clip, OUTLIERS)

    def __call__(self, x: Tensor | Codes, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` at 16, 8 or 4 activation bits, 0: the switch's; codes are of `coding`."""
        if isinstance(x, Codes):
            how = {"group_size": GROUP, "outliers": OUTLIERS}
            return ops.int4_codes_linear(x, *self.tiles, None, self.out_features, self.bias, **how)
        width = bits.activation or self.own.activation
        how = {"activation_bits": width, "activation_clip": self.clip}
        return ops.int4_int8_linear(x, *self.tiles, self.out_features, self.bias, **how)
