"""How does the compiled decoder of the CPU read the weights of a model, where they lie?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..formats.mxfp4 import BLOCK
from ..ops.compiled_decoder import BF16, F32, INT4, MXFP4, Sizes, Weight
from ..ops.tiles import TILE_OUTPUTS
from .architecture import UnknownArchitecture, linear_shape, outline, require_format
from .linear import Int4Linear, Mxfp4Linear
from .packed import PackedLinear

_DENSE = {torch.bfloat16: BF16, torch.float32: F32}


@dataclass
class Layer:
    """Linears by name (q, k, v, o, gate, up, down), norms as in Block."""

    linears: dict[str, Weight]
    norms: list[Tensor | None]
    window: int
    rope_table: int


@dataclass
class Architecture:
    """Everything the compiled decoder needs of a model but its rotary tables."""

    sizes: Sizes
    dtype: torch.dtype
    embedding: Tensor
    final_norm: Tensor
    head: Weight
    layers: list[Layer]
    rope_kinds: list[str | None]


def read(model: nn.Module) -> Architecture:
    """The architecture of a model, its weights shared. UnknownArchitecture names the first thing that does not fit."""
    found = outline(model)
    layers = [
        Layer(_linears(block.modules, found.sizes), block.norms, block.window, block.rope_table)
        for block in found.blocks
    ]
    head = read_weight(found.head, "lm_head")
    return Architecture(
        found.sizes, found.dtype, found.embedding, found.final_norm, head, layers, found.rope_kinds
    )


def _linears(modules: dict[str, nn.Module], sizes: Sizes) -> dict[str, Weight]:
    """Every linear by itself, as the decoder of the CPU takes them."""
    if "qkv" in modules:
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        q, k, v = cut_weight(modules["qkv"], [queries, keys, keys], "qkv_proj")
        gate, up = cut_weight(modules["gate_up"], [sizes.intermediate] * 2, "gate_up_proj")
    else:
        q, k, v, gate, up = (read_weight(modules[name], name) for name in ("q", "k", "v", "gate", "up"))
    linears = {"q": q, "k": k, "v": v, "o": read_weight(modules["o"], "o"), "gate": gate, "up": up}
    linears["down"] = read_weight(modules["down"], "down")
    for group in (("q", "k", "v"), ("gate", "up")):
        if len({(linears[n].format, linears[n].group_size, linears[n].activation_bits) for n in group}) > 1:
            raise UnknownArchitecture(f"its {', '.join(group)} projections have weights of different formats")
    return linears


def read_weight(linear: nn.Module, name: str) -> Weight:
    """A linear's weight where it lies; a packed one is put in tiles. UnknownArchitecture names what does not fit."""
    in_features, out_features = linear_shape(linear, name)
    bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
    if isinstance(linear, PackedLinear):
        return _packed(linear, bias)
    require_format(linear.weight, name)
    return Weight(_DENSE[linear.weight.dtype], linear.weight.detach(), in_features, out_features, bias=bias)


def _packed(linear: Mxfp4Linear | Int4Linear, bias: Tensor | None) -> Weight:
    linear.prepack_()
    tiles, scales, bits = linear.weight_tiles.detach(), linear.scale_tiles.detach(), linear.activation_bits
    shape = linear.in_features, linear.out_features
    if isinstance(linear, Mxfp4Linear):
        return Weight(MXFP4, tiles, *shape, scales, bias=bias, group_size=BLOCK, activation_bits=bits)
    zeros = None if linear.zero_tiles is None else linear.zero_tiles.detach()
    return Weight(INT4, tiles, *shape, scales, zeros, bias, linear.group_size, bits)


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
