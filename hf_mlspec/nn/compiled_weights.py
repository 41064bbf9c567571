"""How does the compiled decoder read one linear of a model, or one norm, and which of them does it not take?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..formats.mxfp4 import BLOCK
from ..ops.compiled_decoder import BF16, F32, INT4, MXFP4, Weight
from ..ops.tiles import TILE_OUTPUTS
from .linear import Int4Linear, Mxfp4Linear, is_dense
from .packed import PackedLinear

_DENSE = {torch.bfloat16: BF16, torch.float32: F32}


class UnknownArchitecture(ValueError):
    """The compiled decoder cannot run this model; the message says why."""


def norm_weight(norm: nn.Module, plus: float) -> Tensor:
    """float32, with ``plus`` added: 1 where the architecture stores the difference from 1."""
    return (norm.weight.detach().float() + plus).contiguous()


def read_weight(linear: nn.Module, name: str) -> Weight:
    """A linear's weight where it lies; a packed one is put in tiles. UnknownArchitecture names what does not fit."""
    if not is_dense(linear) and type(linear) not in (Mxfp4Linear, Int4Linear):
        raise UnknownArchitecture(f"its {name} is a {type(linear).__name__}")
    bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
    if isinstance(linear, PackedLinear):
        return _packed(linear, bias)
    require_format(linear.weight, name)
    weight = linear.weight.detach()  # its shape is what counts: pruning may have left in_features behind
    return Weight(_DENSE[weight.dtype], weight, weight.shape[1], weight.shape[0], bias=bias)


def _packed(linear: Mxfp4Linear | Int4Linear, bias: Tensor | None) -> Weight:
    linear.prepack_()
    tiles, scales, bits = linear.weight_tiles.detach(), linear.scale_tiles.detach(), linear.activation_bits
    shape = linear.in_features, linear.out_features
    if isinstance(linear, Mxfp4Linear):
        return Weight(MXFP4, tiles, *shape, scales, bias=bias, group_size=BLOCK, activation_bits=bits)
    zeros = None if linear.zero_tiles is None else linear.zero_tiles.detach()
    return Weight(INT4, tiles, *shape, scales, zeros, bias, linear.group_size, bits)


def require_format(weight: Tensor, name: str) -> None:
    """UnknownArchitecture unless a dense weight can be read in place."""
    if weight.dtype not in _DENSE:
        raise UnknownArchitecture(f"its {name} is {weight.dtype}; the compiled decoder takes bfloat16 and float32")
    if not weight.is_contiguous():
        raise UnknownArchitecture(f"its {name} is not contiguous in memory")


def cut_weight(linear: nn.Module, sizes: list[int], name: str) -> list[Weight]:
    """The parts of a linear that computes several at once (Phi-3), as views."""
    whole = read_weight(linear, name)
    packed = whole.format in (MXFP4, INT4)
    if packed and any(size % TILE_OUTPUTS for size in sizes):
        raise UnknownArchitecture(f"its {name} is cut at {sizes}, packed weights only at multiples of {TILE_OUTPUTS}")
    parts, first = [], 0
    for size in sizes:
        outputs = slice(first, first + size)
        rows = slice(first // TILE_OUTPUTS, (first + size) // TILE_OUTPUTS) if packed else outputs
        scale, zero = (None if part is None else part[rows] for part in (whole.scale, whole.zero))
        bias = None if whole.bias is None else whole.bias[outputs]
        parts.append(Weight(whole.format, whole.weight[rows], whole.in_features, size, scale, zero, bias,
                            whole.group_size, whole.activation_bits))  # fmt: skip
        first += size
    return parts
