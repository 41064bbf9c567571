"""What does the decoder of GPUs hold of a layer? Its linears joined, norms, experts, the orders of its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...formats.hadamard import Hadamard
from ..architecture import Block, Outline
from .adapted import AdaptedLinear, joined_with_adapters
from .delta import DeltaLayer, delta_layer
from .experts import ExpertLayer, expert_layer
from .heads_and_norms import LayerNorm, norm_of
from .weights import JoinedLinear, OrderedLinear, RotatedLinear

LayerLinear = JoinedLinear | AdaptedLinear


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its linears joined, its norms float32, None where there is none; `rope`: which table.
    index: of its keys and values, or of the states of its net.
    heads_together: norms over all queries and over all keys, in place of q_norm and k_norm. Orders: of the
    inputs of `qkv`, `gate_up` and `down`, int32 ``[in]``, which the kernel in front of each writes; None for inputs as
    they come. down_rotation: of the inputs of `down`, by the same kernel; a linear has either. experts: in place of
    `gate_up` and `down`. sinks: of `ops.ragged_attention_rows`. delta: in place of `qkv`, `o` and what goes with them.
    """

    qkv: LayerLinear | None
    o: LayerLinear | None
    gate_up: LayerLinear | None
    down: LayerLinear | None
    experts: ExpertLayer | None
    qkv_order: Tensor | None
    gate_up_order: Tensor | None
    down_order: Tensor | None
    down_rotation: Hadamard | None
    attention_norm: Tensor | LayerNorm | None
    mlp_norm: Tensor | LayerNorm | None
    attention_out: Tensor | LayerNorm | None
    mlp_out: Tensor | LayerNorm | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads_together: tuple[Tensor, Tensor] | None
    window: int
    rope: int
    sinks: Tensor | None
    index: int
    delta: DeltaLayer | None = None

    def blocks(self) -> list[tuple[LayerLinear | None, LayerLinear | None, Tensor | None]]:
        """Attention and MLP: the first linear, the last, the order of the first one's inputs."""
        return [(self.qkv, self.o, self.qkv_order), (self.gate_up, self.down, self.gate_up_order)]

    def linears(self) -> list[LayerLinear]:
        """Those that all tokens go through, but for the head."""
        shared = [] if self.experts is None else self.experts.shared
        nets = [] if self.delta is None else [self.delta.qkvz, self.delta.ba, self.delta.out]
        return [one for one in (self.qkv, self.o, *nets, self.gate_up, self.down, *shared) if one is not None]


def _without_order(linear: LayerLinear) -> tuple[LayerLinear, Tensor | None]:
    """A linear for inputs that are in its order, and the order."""
    return (linear.linear, linear.order) if isinstance(linear, OrderedLinear) else (linear, None)


def _mlp(block: Block) -> dict[str, Any]:
    """The fields of a `Layer` that its MLP or its experts fill; all None where it has neither."""
    if block.experts is None and "down" not in block.modules:
        fields = "gate_up", "down", "gate_up_order", "down_order", "down_rotation", "experts"
        return dict.fromkeys(fields)
    if block.experts is not None:
        fields = "gate_up", "down", "gate_up_order", "down_order", "down_rotation"
        return {**dict.fromkeys(fields), "experts": expert_layer(block.experts)}
    gate_up = [block.modules[name] for name in ("gate", "up", "gate_up") if name in block.modules]
    joined_gate_up, gate_up_order = _without_order(joined_with_adapters(gate_up, "gate, up"))
    down, down_order = _without_order(joined_with_adapters([block.modules["down"]], "down"))
    down, down_rotation = (down.linear, down.how) if isinstance(down, RotatedLinear) else (down, None)
    found = {"gate_up": joined_gate_up, "down": down, "gate_up_order": gate_up_order, "down_order": down_order}
    return {**found, "down_rotation": down_rotation, "experts": None}


def read_layer(block: Block, found: Outline, device: torch.device, index: int) -> Layer:
    """index: of its keys and values, or of the states of its delta net."""
    if block.delta is not None:
        return _delta_layer(block, found, device, index)
    modules = block.modules
    qkv = [modules[name] for name in ("q", "k", "v", "qkv", "qkv_by_head") if name in modules]
    attention, mlp, attention_out, mlp_out, q_norm, k_norm = [norm_of(norm, found, device) for norm in block.norms]
    together = None
    if q_norm is not None and len(q_norm) > found.sizes.head_dim:
        together, q_norm, k_norm = (q_norm, k_norm), None, None
    joined_qkv, qkv_order = _without_order(joined_with_adapters(qkv, "q, k, v"))
    return Layer(
        qkv=joined_qkv,
        o=joined_with_adapters([modules["o"]], "o"),
        qkv_order=qkv_order,
        **_mlp(block),
        attention_norm=attention,
        mlp_norm=mlp,
        attention_out=attention_out,
        mlp_out=mlp_out,
        q_norm=q_norm,
        k_norm=k_norm,
        heads_together=together,
        window=block.window,
        rope=block.rope_table,
        sinks=None if block.sinks is None else block.sinks.float().contiguous(),
        index=index,
    )


def _delta_layer(block: Block, found: Outline, device: torch.device, index: int) -> Layer:
    attention, mlp, attention_out, mlp_out, *_ = [norm_of(norm, found, device) for norm in block.norms]
    without = "qkv", "o", "qkv_order", "q_norm", "k_norm", "heads_together", "sinks"
    return Layer(
        **dict.fromkeys(without),
        **_mlp(block),
        attention_norm=attention,
        mlp_norm=mlp,
        attention_out=attention_out,
        mlp_out=mlp_out,
        window=0,
        rope=block.rope_table,
        delta=delta_layer(block, found.sizes.delta, device, index),
        index=index,
    )
