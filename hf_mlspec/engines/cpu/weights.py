"""How does the CPU decoder read the weights of a model, where they lie?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...formats import Parts
from ...formats.int4 import Int4Parts
from ...formats.int4_int8 import OUTLIERS, Int4Int8Parts
from ...formats.lut import LutParts
from ...formats.mxfp4 import BLOCK, Mxfp4Parts
from ...formats.nested import NestedParts
from ...formats.planes import PlanesParts
from ...formats.zipper import ZipperParts
from ...nn.adapters import base_of, is_adapted, low_rank_of
from ...nn.coded_embedding import CodedEmbedding
from ...nn.int4_int8 import Int4Int8Linear
from ...nn.linear import Int4Linear, Mxfp4Linear, lay_rows
from ...nn.lut import LutLinear
from ...nn.nested import NestedLinear
from ...nn.packed import PackedLinear
from ...nn.planes import PlanesLinear
from ...nn.zipper import ZipperLinear
from ...nn.zipper_embedding import ZipperEmbedding
from ...ops.compiled_decoder import (
    BF16,
    F32,
    INT4,
    LUT,
    MXFP4,
    NESTED,
    PLANES,
    ZIPPER,
    DeltaNet,
    Experts,
    NestedTable,
    Sizes,
    Weight,
)
from ...ops.layer_forms import LayerForm, TokenInputs
from ...ops.tiles import TILE_OUTPUTS
from ...ops.zipper import low_group
from ...ops.zipper_table import ZipperTable
from ..architecture import Norm, Rotation, UnknownArchitecture, as_read, linear_shape, outline, require_format
from ..slots import order_of, require_one_order, rotation_of, slot_of
from .experts import read_experts

_DENSE = {torch.bfloat16: BF16, torch.float32: F32}


@dataclass
class Layer:
    """Linears by name (q, k, v, o, gate, up, down, or experts for the last three, or delta and its linears for the
    first four), norms as in Block; sinks float32 ``[heads]``."""

    linears: dict[str, Weight]
    norms: list[Norm | None]
    window: int
    rope_table: int
    experts: Experts | None
    sinks: Tensor | None
    delta: DeltaNet | None
    form: LayerForm


@dataclass
class Architecture:
    """Everything the CPU decoder needs of a model but its rotary tables."""

    sizes: Sizes
    dtype: torch.dtype
    embedding: Tensor | NestedTable | ZipperTable
    final_norm: Norm
    head: Weight
    layers: list[Layer]
    rotation: Rotation
    positions: Tensor | None
    inputs: TokenInputs | None = None
    projection: Weight | None = None  # token_inputs


def read(model: nn.Module) -> Architecture:
    """The architecture of a model, its weights shared. UnknownArchitecture names the first thing that does not fit."""
    found = outline(model)
    layers = [
        Layer(
            _linears(block.modules, found.sizes),
            block.norms,
            block.window,
            block.rope_table,
            None if block.experts is None else read_experts(block.experts, read_weight),
            None if block.sinks is None else block.sinks.float().contiguous(),
            block.delta,
            block.form,
        )
        for block in found.blocks
    ]
    head = read_weight(found.head, "lm_head")
    table = read_table(found.embedding)
    places = found.rotation, found.positions
    own = found.inputs
    inputs = (None, None) if own is None else (own.inputs, read_weight(own.projection, "token_inputs"))
    return Architecture(found.sizes, found.dtype, table, found.final_norm, head, layers, *places, *inputs)


def _linears(modules: dict[str, nn.Module], sizes: Sizes) -> dict[str, Weight]:
    """Every linear by itself, as the decoder of the CPU takes them."""
    linears = {name: _read_adapted(module, name) for name, module in modules.items() if name not in ("qkv", "gate_up")}
    if "qkv_by_head" in linears:
        linears["q"] = linears.pop("qkv_by_head")  # whole: the decoder knows where its heads lie
    if "qkv" in modules:
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        cuts = cut_weight(modules["qkv"], [queries, keys, keys], "qkv_proj")
        linears |= dict(zip(("q", "k", "v"), cuts, strict=True))
    if "gate_up" in modules:
        cuts = cut_weight(modules["gate_up"], [sizes.intermediate] * 2, "gate_up_proj")
        linears |= dict(zip(("gate", "up"), cuts, strict=True))
    for group in (("q", "k", "v"), ("gate", "up"), ("delta_qkv", "delta_z"), ("delta_b", "delta_a")):
        group = [name for name in group if name in linears]
        if len(group) < 2:
            continue
        if len({(linears[n].format, linears[n].group_size, linears[n].bits) for n in group}) > 1:
            raise UnknownArchitecture(f"its {', '.join(group)} projections have weights of different formats")
        require_one_order([linears[name].order for name in group], ", ".join(group))
    return linears


def read_weight(linear: nn.Module, name: str) -> Weight:
    """A linear's weight where it lies; a packed one is put in tiles. UnknownArchitecture names what does not fit, such
    as adapters where the decoder adds none."""
    if is_adapted(linear):
        raise UnknownArchitecture(f"its {name} carries adapters; those of a layer's linears alone are added")
    in_features, out_features = linear_shape(linear, name)
    bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
    if isinstance(linear, PackedLinear):
        return _packed(linear, bias, name)
    weight = lay_rows(linear).detach()
    require_format(weight, name, halves=True)
    weight, rotation = as_read(weight), rotation_of(linear, name)
    return Weight(_DENSE[weight.dtype], weight, in_features, out_features, bias=bias, rotation=rotation)


def _read_adapted(linear: nn.Module, name: str) -> Weight:
    """The same for a linear of a layer, which may carry adapters: they run beside it."""
    if not is_adapted(linear):
        return read_weight(linear, name)
    if name.startswith("delta_"):
        raise UnknownArchitecture(f"its {name} carries adapters; those of attention and MLP alone are added")
    linear_shape(linear, name)  # of LoRA alone
    weight, adapter = read_weight(base_of(linear), name), low_rank_of(linear)
    if adapter is not None and weight.rotation is not None:
        raise UnknownArchitecture(f"its {name} carries adapters and rotates its inputs")
    return replace(weight, adapter=adapter)


def read_table(table: Tensor | CodedEmbedding) -> Tensor | NestedTable | ZipperTable:
    """A table where it lies: of codes in tiles, or in rows."""
    if isinstance(table, Tensor):
        return table
    if isinstance(table, ZipperEmbedding):
        return table.table()
    (draft, exponents, low, _), escapes = table.tiles()
    return NestedTable(draft, exponents, low, **escapes)


def _packed(linear: PackedLinear, bias: Tensor | None, name: str) -> Weight:
    slot = slot_of(SLOTS, linear, name, "CPU")
    shape = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": bias}
    shape |= {"order": order_of(linear), "rotation": rotation_of(linear, name)}
    if shape["order"] is not None and linear.format == "nested":
        raise UnknownArchitecture(f"its {name} orders the inputs of a nested weight")
    return slot(linear, linear.prepack_().parts("weight"), {**shape, "bits": linear.switch.bits})


def _nested(linear: NestedLinear, parts: NestedParts, shape: dict[str, Any]) -> Weight:
    own = {"scale": parts.scale, "low": parts.low, "codebook": parts.codebook, "group_size": BLOCK}
    escapes = {"escape_rows": parts.escape_index, "escape_weight": parts.escape_value}
    return Weight(NESTED, parts.packed, **own, **escapes, **shape)


def _planes(linear: PlanesLinear, parts: PlanesParts, shape: dict[str, Any]) -> Weight:
    own = {"group_size": linear.group_size, "zero_doubled": linear.zero_doubled}
    if linear.source is None:
        return Weight(PLANES, parts.planes, scale=parts.scale, **own, **shape)
    ((tiles, scales, _),) = linear.source.resident([linear])
    own |= {"resident_planes": linear.source.top, "key": id(linear)}
    return Weight(PLANES, tiles, scale=scales, **own, **shape)


def _lut(linear: LutLinear, parts: LutParts, shape: dict[str, Any]) -> Weight:
    return Weight(LUT, parts.planes, tables=parts.tables, **shape)


def _zipper(linear: ZipperLinear, parts: ZipperParts, shape: dict[str, Any]) -> Weight:
    own = {"scale": parts.scale, "high": parts.split, "group_size": low_group(linear.in_features, linear.how)}
    return Weight(ZIPPER, parts.planes, **own, **shape)


def _mxfp4(linear: Mxfp4Linear, parts: Mxfp4Parts, shape: dict[str, Any]) -> Weight:
    return Weight(MXFP4, parts.packed, scale=parts.scale, group_size=BLOCK, **shape)


def _int4(linear: Int4Linear, parts: Int4Parts, shape: dict[str, Any]) -> Weight:
    own = {"scale": parts.scale, "zero": parts.zero, "group_size": linear.group_size}
    return Weight(INT4, parts.packed, **own, **shape, activation_clip=linear.switch.activation_clip)


def _int4_int8(linear: Int4Int8Linear, parts: Int4Int8Parts, shape: dict[str, Any]) -> Weight:
    order = shape["order"]
    if order is None:
        order = torch.arange(linear.in_features, dtype=torch.int32)
    own = {"group_size": linear.group_size, "outliers": OUTLIERS, "activation_clip": linear.switch.activation_clip}
    twice = {**shape, "order": torch.cat([order, order[-OUTLIERS:]])}
    return Weight(INT4, parts.packed, scale=parts.scale, **own, **twice)


# Of each format: (linear, its tiles, its shape, bias and bits as fields of a Weight) -> how the CPU decoder reads it.
SLOTS: dict[str, Callable[[Any, Parts, dict[str, Any]], Weight]] = {
    "mxfp4": _mxfp4,
    "int4": _int4,
    "nested": _nested,
    "planes": _planes,
    "lut": _lut,
    "int4_int8": _int4_int8,
    "zipper": _zipper,
}


def cut_weight(linear: nn.Module, sizes: list[int], name: str) -> list[Weight]:
    """The parts of a linear that computes several at once (Phi-3), as views."""
    whole = _read_adapted(linear, name)
    packed = whole.format not in (BF16, F32)
    if whole.format == ZIPPER:
        raise UnknownArchitecture(f"its {name} computes several linears with a zipper weight, which is not cut")
    if packed and any(size % TILE_OUTPUTS for size in sizes):
        raise UnknownArchitecture(f"its {name} is cut at {sizes}, packed weights only at multiples of {TILE_OUTPUTS}")
    parts, first = [], 0
    for size in sizes:
        parts.append(_cut(whole, first, size, TILE_OUTPUTS if packed else 1))
        first += size
    return parts


def _cut(whole: Weight, first: int, size: int, height: int) -> Weight:
    """Outputs ``first`` to ``first + size`` of a weight whose rows hold ``height`` outputs each."""
    outputs, rows = slice(first, first + size), slice(first // height, (first + size) // height)
    weight = whole.weight[:, rows] if whole.format in (PLANES, LUT) else whole.weight[rows]
    beside = {"scale": whole.scale, "zero": whole.zero, "low": whole.low, "tables": whole.tables}
    beside = {name: None if part is None else part[rows] for name, part in beside.items()}
    bias = None if whole.bias is None else whole.bias[outputs]
    adapter = None if whole.adapter is None else (whole.adapter[0], whole.adapter[1][outputs])
    own = replace(whole, weight=weight, out_features=size, bias=bias, adapter=adapter, **beside)
    if whole.escape_rows is None:
        return own
    inside = (whole.escape_rows >= first) & (whole.escape_rows < first + size)
    if not inside.any():
        return replace(own, escape_rows=None, escape_weight=None)
    return replace(own, escape_rows=whole.escape_rows[inside] - first, escape_weight=whole.escape_weight[inside])
