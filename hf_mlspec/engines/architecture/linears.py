"""Which linears can a compiled decoder read, and how large are they?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...nn.adapters import base_of, is_lora
from ...nn.linear import is_dense, is_transposed
from ...nn.packed import PackedLinear
from ...nn.packed_formats import PACKINGS
from ...nn.transforms import HADAMARD, NONE, ORDER, TransformedLinear
from .parts import UnknownArchitecture

DENSE = (torch.bfloat16, torch.float32)


def linear_shape(linear: nn.Module, name: str) -> tuple[int, int]:
    """(in, out) features of a linear that a compiled decoder can read, with adapters or without; UnknownArchitecture
    for another module."""
    linear = base_of(linear) if is_lora(linear) else linear
    if is_dense(linear):  # the weight's shape is what counts: pruning may have left in_features behind
        return linear.weight.shape[1], linear.weight.shape[0]
    if is_transposed(linear):
        return tuple(linear.weight.shape)
    rotated = type(linear) is TransformedLinear
    if not rotated and not is_packed(linear):
        raise UnknownArchitecture(f"its {name} is a {type(linear).__name__}")
    if linear.transform not in ((HADAMARD,) if rotated else (NONE, ORDER, HADAMARD)):
        what = linear.transform.word
        raise UnknownArchitecture(f"its {name} transforms its inputs ({what}), which no compiled decoder does")
    return linear.in_features, linear.out_features


def is_packed(module: nn.Module) -> bool:
    """Whether a module is the very class that its format registered; whether a decoder reads it, its slots say."""
    packing = PACKINGS.get(module.format) if isinstance(module, PackedLinear) else None
    return packing is not None and type(module) is packing.linear


def require_format(weight: Tensor, name: str, halves: bool = False) -> None:
    """UnknownArchitecture unless a dense weight can be read in place, or with `halves` as `as_read` gives it."""
    if weight.dtype not in DENSE and not (halves and weight.dtype == torch.float16):
        raise UnknownArchitecture(f"its {name} is {weight.dtype}; the compiled decoder takes bfloat16 and float32")
    if not weight.is_contiguous():
        raise UnknownArchitecture(f"its {name} is not contiguous in memory")


def as_read(weight: Tensor) -> Tensor:
    """A dense weight where it lies; of float16, which kernels of the CPU do not multiply, a float32 copy."""
    return weight.float() if weight.dtype == torch.float16 else weight
