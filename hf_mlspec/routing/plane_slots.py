"""For how many layers has a budget room, and is it enough for what is always there?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..nn.planes import PlanesLinear
from .plane_room_cuda import CudaRoom
from .plane_rooms import CpuRoom, Sizes, sizes_on

SLOTS = 8  # layers whose low planes are fetched ahead, at most
_LEAST_SLOTS = 2


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
    half = (budget + need) // 2  # the other half is for low planes that stay
    more = range(min(SLOTS, len(sizes)), least, -1)
    return next((own for own in more if stays + kind.needed(sizes, top, own) <= half), least)
