"""What does the decoder of GPUs hold of a gated delta net, or of Mamba-2, and how do tokens go through it?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ... import ops
from ...ops.compiled_decoder import DeltaNet, DeltaSizes
from ...precision import Bits
from ..architecture import Block
from .states import DeltaStates
from .weights import JoinedLinear, joined


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """A net in place of attention: queries, keys, values and gates as one linear, b and a as another; of Mamba-2 one
    for all. orders: of the outputs of both where they come key head by key head, int32; else None. index: of its
    states."""

    qkvz: JoinedLinear
    ba: JoinedLinear | None
    out: JoinedLinear
    net: DeltaNet
    sizes: DeltaSizes
    orders: tuple[Tensor, Tensor] | None
    index: int

    def __call__(self, normed: Tensor, lanes: tuple, states: DeltaStates, settles: int, bits: Bits):
        """What the net adds, normed ``[n, hidden]``; lanes: as of the decoder's attention."""
        batch, width, starts, counts, packing, _ = lanes
        parts = [linear(normed, bits) for linear in (self.qkvz, self.ba) if linear is not None]
        if self.orders is not None:
            parts = [ops.ordered_rows(part, order) for part, order in zip(parts, self.orders, strict=True)]
        if packing is not None:
            parts = [part.index_select(0, packing.place) for part in parts]
        qkvz, ba = [*(part.view(batch, width, -1) for part in parts), None][:2]
        net, sizes = self.net, self.sizes
        numbers = [sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim]
        mixed = ops.delta_rows(
            qkvz, ba, net.taps, net.rate, net.shift, net.norm, net.eps, starts, counts, states.marks,
            states.states[self.index], states.inputs[self.index], numbers, settles, states.behind, net.bias, net.skip,
            sizes.normed or sizes.value_dim,
        ).view(batch * width, -1)  # fmt: skip
        return self.out(mixed if packing is None else mixed.index_select(0, packing.take), bits)


def delta_layer(block: Block, sizes: DeltaSizes, device: torch.device, index: int) -> DeltaLayer:
    """Moves the weights as `joined` does."""
    modules = block.modules
    groups = [("delta_qkv", "delta_z"), ("delta_b", "delta_a")]
    found = [[modules[name] for name in names if name in modules] for names in groups]
    linears = [joined(own, ", ".join(names)) if own else None for own, names in zip(found, groups, strict=True)]
    orders = tuple(order.to(device) for order in _orders(sizes)) if sizes.grouped else None
    own = {name: part.to(device) for name, part in vars(block.delta).items() if isinstance(part, Tensor)}
    net = replace(block.delta, **own)
    return DeltaLayer(*linears, joined([modules["delta_out"]], "delta_out"), net, sizes, orders, index)


def _orders(sizes: DeltaSizes) -> tuple[Tensor, Tensor]:
    """Where queries, keys, values, gates, and where b and a lie among those of one key head after the other."""
    each = sizes.value_heads // sizes.key_heads
    widths = [sizes.key_dim, sizes.key_dim, each * sizes.value_dim, each * sizes.value_dim]
    orders = []
    for parts in (widths, [each, each]):
        places = torch.arange(sizes.key_heads * sum(parts), dtype=torch.int32).view(sizes.key_heads, -1)
        orders.append(torch.cat([part.reshape(-1) for part in places.split(parts, dim=1)]).contiguous())
    return tuple(orders)
