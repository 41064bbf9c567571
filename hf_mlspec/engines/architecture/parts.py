"""What does a decoder see of a model before it reads the linears?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...nn.coded_embedding import CodedEmbedding
from ...ops.compiled_decoder import DeltaNet, Sizes
from ...ops.layer_forms import NO_FORM, LayerForm, TokenInputs
from .mixture import ExpertBlock
from .rotary import Rotation


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
