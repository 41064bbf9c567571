"""What does a decoder see of a model before it reads the linears, and which linears can it read?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.adapters import base_of, is_lora
from ...nn.coded_embedding import CodedEmbedding
from ...nn.linear import is_dense, is_transposed
from ...nn.packed import PackedLinear
from ...nn.packed_formats import PACKINGS
from ...nn.transforms import HADAMARD, NONE, ORDER, TransformedLinear
from ...ops.compiled_decoder import DeltaNet, Sizes
from ...ops.layer_forms import NO_FORM, LayerForm, TokenInputs
from .description import Description
from .mixture import ExpertBlock
from .rotary import Rotation

DENSE = (torch.bfloat16, torch.float32)


class UnknownArchitecture(ValueError):
    """The compiled decoder cannot run this model; the message says why."""


class UndescribedClass(UnknownArchitecture):
    """Nothing is known of the model's class."""


@dataclass(frozen=True)
class Norm:
    """Weight and bias (None: none) float32, any +1 added."""

    weight: Tensor
    bias: Tensor | None = None

    def times(self, factor: float) -> Norm:
        """The norm whose output is ``factor`` times this one's."""
        return self if factor == 1 else Norm(self.weight * factor, None if self.bias is None else self.bias * factor)


@dataclass
class Block:
    """One layer of a model: its linears by name, its norms, None where there is none.

    modules: q, k, v or all three as qkv; o; or, of a gated delta net, delta_qkv, _z, _b, _a and _out;
    gate, up or both as gate_up, and down where no `experts` stand for these.
    """

    modules: dict[str, nn.Module]
    norms: list[Norm | None]  # in the order of description.NORMS
    window: int
    rope_table: int
    experts: ExpertBlock | None = None
    sinks: Tensor | None = None  # of the softmax of each head
    delta: DeltaNet | None = None
    form: LayerForm = NO_FORM


@dataclass(frozen=True)
class LayerTable:
    """Inputs of layers, and the linear of embeddings that is part of them."""

    inputs: TokenInputs
    projection: nn.Module

    @property
    def width(self) -> int:
        """Elements that a layer gets."""
        return self.inputs.width


@dataclass
class Outline:
    """A model as a decoder sees it before it reads the linears. embedding: the table, or what reads one of codes.
    positions: the table that is added to it, a row for each position; None where there is none. inputs: of layers,
    beside the residual stream; None where they have none."""

    sizes: Sizes
    dtype: torch.dtype
    embedding: Tensor | CodedEmbedding
    final_norm: Norm
    head: nn.Module
    blocks: list[Block]
    rotation: Rotation
    positions: Tensor | None = None
    inputs: LayerTable | None = None


def table_dtype(table: nn.Module) -> torch.dtype:
    """Of an embedding's rows."""
    return table.dtype if isinstance(table, CodedEmbedding) else table.weight.dtype


def part(whole: nn.Module, place: str, get: Callable[[nn.Module, str], Any] = nn.Module.get_submodule) -> Any:
    """The module, or what else is got, of a model or a layer at a place that its description names."""
    for choice in place.split(" | "):
        try:
            return get(whole, choice)
        except AttributeError:
            continue
    name = type(whole).__name__
    raise UnknownArchitecture(f"its description names {place}, which its {name} does not have")


def norm_of(norm: nn.Module, entry: Description, width: int) -> Norm:
    """1 is added to the weight where the architecture stores the difference from 1; without a weight all are 1."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if weight is None:
        return Norm(torch.ones(width))
    scale = (weight.detach().float() + (1.0 if entry.norm.endswith("plus one") else 0.0)).contiguous()
    return Norm(scale, None if bias is None else bias.detach().float().contiguous())


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
