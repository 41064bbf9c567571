"""Where does a layer in bit-planes get the planes of a product, if they are not all beside it in memory?"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .planes import PlanesLinear


@dataclass
class PlaneCounts:
    """What was streamed.

    fetched_bytes: of low planes that came from the host or the disk. stall_seconds: in which a product waited for
    them, on a GPU those of its stream. hits: low planes read that were resident; ahead: that were fetched before they
    were asked for, come or on their way; late: fetched when they were asked for. evicted: that lost their place.
    """

    fetched_bytes: int = 0
    stall_seconds: float = 0.0
    hits: int = 0
    ahead: int = 0
    late: int = 0
    evicted: int = 0

    def reset(self) -> None:
        """All zero again."""
        for field in fields(self):
            setattr(self, field.name, field.default)


class PlaneSource(Protocol):
    """Gives layers their planes; routing/plane_loader.py has one."""

    def reading(self, linear: PlanesLinear, num_planes: int) -> AbstractContextManager[tuple[Tensor, Tensor]]:
        """A block inside of which the first ``num_planes`` planes are there: plane_tiles with the places of all
        planes, and scale_tiles. Errors where a plane cannot be had."""

    def whole(self, linear: PlanesLinear) -> tuple[Tensor, Tensor]:
        """plane_tiles and scale_tiles with all planes: a copy, which is not kept."""

    def counting(self) -> AbstractContextManager[PlaneCounts]:
        """A block whose products, in this thread, are counted in what it gives."""
