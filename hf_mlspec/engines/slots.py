"""Which packed weights does a decoder read, by the word of the format, and what is done to their inputs first?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..formats.hadamard import Hadamard
from ..nn.experts import PackedExperts
from ..nn.packed import PackedLinear
from ..nn.transforms import HADAMARD, NONE, ORDER, hadamard_of
from .architecture import ExpertBlock, UnknownArchitecture, require_format

Slot = TypeVar("Slot")
EXPERT_FORMATS = ("mxfp4", "int4", "nested", "planes")  # of packed experts
ROTATED = ("o", "down")  # linears whose inputs no other linear reads


def slot_of(slots: Mapping[str, Slot], linear: PackedLinear, name: str, decoder: str) -> Slot:
    """What reads the weight of ``linear``, which is ``name`` in its model, in the decoder of these ``slots``.

    UnknownArchitecture for a format without a slot, and on GPUs for low parts of zipper weights that meet integers
    and are not int4.
    """
    if linear.switch.bits.activation != 16 and not meets_integers(linear, decoder):
        raise UnknownArchitecture(
            f"its {name} linears multiply zipper weights by {linear.switch.bits.activation}-bit activations, which "
            f"the {decoder} decoder does where the low part has 4 bits alone (mode 'paper')"
        )
    slot = slots.get(linear.format)
    if slot is None:
        raise UnknownArchitecture(f"its {name} linears are {linear.format}, which the {decoder} decoder does not read")
    return slot


def meets_integers(linear: PackedLinear, decoder: str) -> bool:
    """Whether the "CPU" or "CUDA" decoder multiplies this weight by all the activation bits that its module knows. A
    weight without memory does not say of which split it is: yes."""
    if decoder == "CPU" or linear.format != "zipper" or linear.weight_split.is_meta:
        return True
    return linear.how.low_is_int4


def require_experts(block: ExpertBlock, decoder: str) -> None:
    """UnknownArchitecture for experts of a layer whose weights the "CPU" or "CUDA" decoder does not read."""
    experts = block.experts
    if not isinstance(experts, PackedExperts):
        for key in block.original.sizes:
            weight = getattr(experts, key).detach()
            turned = block.original.transposed and not weight.is_contiguous()  # a decoder may have laid it out so
            weight = weight.transpose(1, 2) if turned else weight
            require_format(weight, f"experts' {key}", halves=decoder == "CPU")
        return
    if experts.format not in EXPERT_FORMATS or experts.is_lent:
        raise UnknownArchitecture(f"its experts are {experts.format}, which the {decoder} decoder does not read")
    if experts.switch.multiply == "dequant" and decoder == "CUDA":
        raise UnknownArchitecture("its experts multiply by 'dequant', which the CUDA decoder does for linears only")


def order_of(linear: PackedLinear) -> Tensor | None:
    """The order that a linear wants its inputs in: int32 ``[in]``, None for inputs as they come."""
    if linear.transform is not ORDER:
        return None
    order = linear.transform_order.detach().contiguous()
    return None if torch.equal(order, torch.arange(len(order), dtype=order.dtype, device=order.device)) else order


def rotation_of(linear: nn.Module, name: str) -> Hadamard | None:
    """What the inputs of a packed or dense linear, which is ``name`` in its model, are multiplied by; None: nothing,
    or a record without memory. UnknownArchitecture for linears whose inputs others read."""
    if getattr(linear, "transform", NONE) is not HADAMARD or linear.transform_hadamard.is_meta:
        return None
    how = hadamard_of(linear.transform_tensors())
    if not how.is_nothing and name not in ROTATED:
        raise UnknownArchitecture(f"its {name} rotates its inputs; a compiled decoder rotates those of o and down")
    return None if how.is_nothing else how


def require_one_order(orders: Sequence[Tensor | None], name: str) -> None:
    """UnknownArchitecture unless linears that read the same inputs, ``name`` together, want them in one order."""
    first, *others = orders
    if not all(_same(first, other) for other in others):
        raise UnknownArchitecture(f"its {name} projections order their inputs in different ways, and they share them")


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second or (first is not None and second is not None and torch.equal(first, second))
