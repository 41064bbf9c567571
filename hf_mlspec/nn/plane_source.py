"""Where does a layer in bit-planes get the planes of a product, if they are not all beside it in memory?"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from .planes import PlanesLinear


@dataclass
class PlaneCounts:
    """What was streamed.

    fetched_bytes: of low planes that came from the host or the disk. stall_seconds: in which a product waited for
    them, on a GPU those of its stream, not those of CUDA graphs. hits: low planes read that were resident; ahead: that
    were fetched before they were asked for, come or on their way; late: fetched when they were asked for. evicted:
    that lost their place.
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


@dataclass(eq=False)
class InGraph:
    """What a replay of one CUDA graph copies and reads: as of `PlaneCounts`. It lives as long as the graph."""

    fetched_bytes: int = 0
    hits: int = 0
    ahead: int = 0

    @property
    def reads_low(self) -> bool:
        """Whether it reads other planes than top ones."""
        return self.hits + self.ahead > 0


class PlaneSource(Protocol):
    """Gives layers their planes; routing/plane_loader.py has one. top: planes of every layer that are always there.
    copies_in_graphs: whether a CUDA graph can hold the fetches (`captured`). likely: of a router's MLPs what their
    prompts chose, for routing/likely.py; a router that is gone leaves nothing."""

    top: int
    copies_in_graphs: bool
    likely: MutableMapping[nn.Module, Any]

    def reading(self, linear: PlanesLinear, num_planes: int) -> AbstractContextManager[tuple[Tensor | None, ...]]:
        """A block inside of which the first ``num_planes`` planes are there: plane_tiles, which may store no others,
        scale_tiles, and on a GPU what `ops.bitplane_linear` takes as apart. Errors where a plane cannot be had."""

    def expect(self, linear: PlanesLinear, num_planes: int) -> None:
        """The next product of a layer is likely to read so many planes: they may be fetched ahead of it."""

    def alone(self) -> AbstractContextManager:
        """A block inside of which no other thread reads. Who asks for planes while a team of threads computes begins
        it first: another thread may read them and wait for its own turn to compute."""

    def captured(self) -> AbstractContextManager[InGraph]:
        """A block that captures a CUDA graph: inside, `reading` adds copies from the host to the graph, each free to
        run as soon as what it writes to is read. As long as the graph is there, no other planes stay or go."""

    def replaying(self, fetches: InGraph) -> AbstractContextManager[None]:
        """A block that launches a graph with such copies: behind all products before it, ahead of all after it."""

    def resident(self, linears: Sequence[PlanesLinear]) -> list[tuple[Tensor, Tensor, int]]:
        """The ``top`` planes of layers that read the same inputs, where they stay for as long as they are streamed:
        plane_tiles, scale_tiles and outputs, of all layers together where tiles allow it, else of each. Moves them on
        a GPU, which is to be idle."""

    def whole(self, linear: PlanesLinear) -> tuple[Tensor, Tensor]:
        """plane_tiles and scale_tiles with all planes: a copy, which is not kept."""

    def counting(self) -> AbstractContextManager[PlaneCounts]:
        """A block whose products, in this thread, are counted in what it gives."""
