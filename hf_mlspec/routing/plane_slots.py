"""For how many layers has a budget room, is it enough for what is always there, and what if memory ends below it?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..engines.memory import out_of_memory
from ..nn.planes import PlanesLinear
from ..nn.state import say_once
from .plane_room_cuda import CudaRoom
from .plane_rooms import CpuRoom, Sizes, sizes_on

SLOTS = 8  # layers whose low planes are fetched ahead, at most
_LEAST_SLOTS = 2
_SHARE = 8  # one part in so many of what a budget leaves is for more of them: planes that stay are not fetched at all


def low_shapes(linears: Mapping[str, PlanesLinear], device: torch.device, top: int) -> list[tuple[int, int]]:
    """Low planes of every layer, and bytes of one on a device."""
    return [(one.planes - top, one.plane) for one in (sizes_on(device, linear) for linear in linears.values())]


def room_on(device: torch.device) -> type[CpuRoom] | type[CudaRoom]:
    """How planes are held there."""
    return CudaRoom if device.type == "cuda" else CpuRoom


def always(sizes: list[Sizes], top: int) -> int:
    """Bytes of the top planes of all layers, and of what lies beside them."""
    return sum(top * one.plane + one.beside for one in sizes)


def require_budget(linears: Mapping[str, PlanesLinear], device: torch.device, budget: int, top: int) -> int:
    """How many layers a budget allows to be fetched ahead; ValueError, with both numbers, where it is below what is
    always there."""
    kind, sizes = room_on(device), [sizes_on(device, own) for own in linears.values()]
    stays, least = always(sizes, top), min(_LEAST_SLOTS, len(sizes))
    need = stays + kind.needed(sizes, top, least)
    if need > budget:
        raise ValueError(
            f"plane_budget is {budget:,} bytes, and the first {top} planes of all layers, with their scales and "
            f"room for {least} layers that are fetched, take {need:,}: give at least that, or fewer top_planes"
        )
    most = need + (budget - need) // _SHARE  # the rest is for low planes that stay
    more = range(min(SLOTS, len(sizes)), least, -1)
    return next((own for own in more if stays + kind.needed(sizes, top, own) <= most), least)


def require_full(error: Exception, told: PlanesLinear, what: str) -> None:
    """Say, once for a layer, that there was no memory for something that can be left out; raise any other error."""
    if not (isinstance(error, MemoryError) or out_of_memory(error)):
        raise error
    reason, device = str(error).partition("\n")[0], told.weight_planes.device
    say_once(
        told,
        f"no memory on {device} {what}, below plane_budget ({reason}): products fetch them later and are slower, give "
        "a lower budget",
        kind=what,
    )
