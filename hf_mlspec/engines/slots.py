"""Which packed weights does a decoder read? Each has a table of slots, keyed by the word of the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ..nn.architecture import UnknownArchitecture
from ..nn.packed import PackedLinear

Slot = TypeVar("Slot")


def slot_of(slots: Mapping[str, Slot], linear: PackedLinear, name: str, decoder: str) -> Slot:
    """What reads the weight of ``linear``, which is ``name`` in its model, in the decoder of these ``slots``.

    UnknownArchitecture for a format without a slot.
    """
    slot = slots.get(linear.format)
    if slot is None:
        raise UnknownArchitecture(f"its {name} linears are {linear.format}, which the {decoder} decoder does not read")
    return slot
