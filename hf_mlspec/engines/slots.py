"""Which packed weights does a decoder read, by the word of the format, and in which order do their inputs come?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..nn.packed import PackedLinear
from ..nn.transforms import ORDER
from .architecture import UnknownArchitecture

Slot = TypeVar("Slot")


def slot_of(slots: Mapping[str, Slot], linear: PackedLinear, name: str, decoder: str) -> Slot:
    """What reads the weight of ``linear``, which is ``name`` in its model, in the decoder of these ``slots``.

    UnknownArchitecture for a format without a slot.
    """
    slot = slots.get(linear.format)
    if slot is None:
        raise UnknownArchitecture(f"its {name} linears are {linear.format}, which the {decoder} decoder does not read")
    return slot


def order_of(linear: PackedLinear) -> Tensor | None:
    """The order that a linear wants its inputs in: int32 ``[in]``, None for inputs as they come."""
    if linear.transform is not ORDER:
        return None
    order = linear.transform_order.detach().contiguous()
    return None if torch.equal(order, torch.arange(len(order), dtype=order.dtype, device=order.device)) else order


def require_one_order(orders: Sequence[Tensor | None], name: str) -> None:
    """UnknownArchitecture unless linears that read the same inputs, ``name`` together, want them in one order."""
    first, *others = orders
    if not all(_same(first, other) for other in others):
        raise UnknownArchitecture(f"its {name} projections order their inputs in different ways, and they share them")


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))
