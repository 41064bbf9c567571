"""How are streamed planes held on a device? Top planes always, low ones for as long as they are wanted.

A room holds the layers of one model. On the CPU each layer has the addresses of all its planes, and memory for those
that are there: low planes are read to their place and given back to the system. plane_room_cuda.py has that of a GPU.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..nn.planes import PlanesLinear
from ..ops.planes import tiles_cuda
from ..ops.tiles import TILE_OUTPUTS, num_tiles
from ..ops.tiles_cuda import PAIR_OUTPUTS
from .plane_store import PlaneStore


class Sizes(NamedTuple):
    """Of a layer on its device: bytes of a plane, of the scales that lie with the planes, and planes; whether its
    outputs fill their tiles."""

    plane: int
    beside: int
    planes: int
    fills: bool


@dataclass
class Fetch:
    """Low planes on their way: ``count`` of them from number ``first`` on, for the layer at ``place``, in ``slot`` of
    the room."""

    place: int
    first: int
    count: int
    slot: int
    future: Future | None = None
    event: torch.cuda.Event | None = None


class Layer:
    """A layer of the loader. kept: low planes that are resident, its first ones. reads: low planes read, less of those
    long ago. most: the most that a product read, less for one long ago. last: planes of its last product that read low
    ones. home: where its planes were before."""

    def __init__(self, linear: PlanesLinear, place: int, top: int, kept: int):
        self.linear, self.place, self.top, self.kept = linear, place, top, kept
        self.home = linear.weight_planes.device
        self.low, self.reads, self.last = linear.num_planes - top, 0.0, linear.num_planes
        self.most = float(self.low)

    @property
    def resident(self) -> bool:
        """Whether all its planes are."""
        return self.kept == self.low

    @property
    def lacks(self) -> int:
        """Planes of its last product that are not resident."""
        return max(self.last - self.top - self.kept, 0)


class Room(Protocol):
    """Layers on a device: a CpuRoom or a CudaRoom. copies_in_graphs: as of `PlaneSource`; then there are begin_graph,
    tiles_in_graph and lent of a CudaRoom."""

    copies_in_graphs: bool

    def put(self, place: int, tiles: Tensor, resident: bool) -> Tensor:
        """Take over the tiles of the next layer; its low planes ``[planes, bytes]`` for the store."""

    def start(self, fetch: Fetch) -> None:
        """Begin to fetch; the host goes on."""

    def wait(self, fetch: Fetch, stalls: Callable) -> None:
        """Products after this find the planes. Raises what the fetch raised."""

    def tiles(self, place: int, width: int, fetch: Fetch | None) -> Sequence[Tensor | None]:
        """plane_tiles in which the first ``width`` planes are there, and others may have no place; on a GPU the top
        planes alone, and behind them what `ops.bitplane_linear` takes as apart."""

    def tops(self, places: Sequence[int]) -> list[Tensor]:
        """plane_tiles with the top planes of layers that read the same inputs, where they stay until they leave: of
        all together, where their tiles can lie side by side, else of each."""

    def done(self, fetch: Fetch, kept: bool) -> None:
        """The product that the planes were fetched for was started: their slot is free for the next. kept: and the
        planes are resident."""

    def keep(self, fetch: Fetch) -> None:
        """What was fetched is resident from now on, behind what was. Where it raises, it is not."""

    def drop(self, place: int, left: int) -> None:
        """All low planes but the first ``left`` are resident no longer."""

    def whole(self, place: int, *, on_host: bool = False) -> Tensor:
        """plane_tiles with all planes: a copy. on_host: put together there, without memory of the device."""

    def leave(self, place: int) -> None:
        """Hold nothing of this layer any longer."""

    def close(self) -> None:
        """Give back what it holds."""


class CpuRoom:
    """On the CPU; memory is given back page by page, so only on Linux."""

    copies_in_graphs = False

    def __init__(self, sizes: list[Sizes], top: int, slots: int, store: PlaneStore):
        if not sys.platform.startswith("linux"):
            raise ValueError(f"planes are streamed to the CPU on Linux only, not on {sys.platform}: leave it out")
        self.top, self._sizes, self._store = top, sizes, store
        self._maps: list[mmap.mmap | None] = []
        self._held: list[Tensor | None] = []
        self._resident: set[int] = set()
        self._reader = ThreadPoolExecutor(1, "mlspec-planes")
        try:
            self._reader.submit(int).result()  # its thread is there before the first fetch needs it
        except RuntimeError as error:
            raise OSError(
                f"no thread can be started to read planes ahead ({error}): free memory, or let more threads run"
            ) from error

    @staticmethod
    def needed(sizes: list[Sizes], top: int, slots: int) -> int:
        """Bytes beside top and resident planes: those of the slots."""
        return slots * max(one.plane * (one.planes - top) for one in sizes)

    def put(self, place: int, tiles: Tensor, resident: bool) -> Tensor:
        space = mmap.mmap(-1, tiles.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held = torch.frombuffer(space, dtype=torch.uint8).view(tiles.shape)
        count = len(tiles) if resident else self.top
        held[:count] = tiles[:count]
        self._maps.append(space)
        self._held.append(held)
        if resident:
            self._resident.add(place)
        return tiles[self.top :].flatten(1)

    def start(self, fetch: Fetch) -> None:
        first = self.top + fetch.first
        into = self._held[fetch.place][first : first + fetch.count].flatten(1)
        fetch.future = self._reader.submit(self._store.read, fetch.place, fetch.first, into)

    def wait(self, fetch: Fetch, stalls: Callable[[float], None]) -> None:
        if not fetch.future.done():
            begin = time.perf_counter()
            Future.exception(fetch.future)
            stalls(time.perf_counter() - begin)
        fetch.future.result()

    def tiles(self, place: int, width: int, fetch: Fetch | None) -> Sequence[Tensor | None]:
        return (self._held[place],)

    def tops(self, places: Sequence[int]) -> list[Tensor]:
        return [self._held[place] for place in places]

    def done(self, fetch: Fetch, kept: bool) -> None:
        fetch.future.cancel()
        if not fetch.future.cancelled():
            Future.exception(fetch.future)  # it may still write
        if not kept:
            self._drop_from(fetch.place, fetch.first)

    def keep(self, fetch: Fetch) -> None:
        """They are where they were read to."""
        if self.top + fetch.first + fetch.count == self._sizes[fetch.place].planes:
            self._resident.add(fetch.place)

    def drop(self, place: int, left: int) -> None:
        self._drop_from(place, left)
        self._resident.discard(place)

    def _drop_from(self, place: int, low: int) -> None:
        own = self._sizes[place]
        first = -(-(self.top + low) * own.plane // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only
        length = (own.planes * own.plane - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self._maps[place].madvise(mmap.MADV_DONTNEED, first, length)

    def whole(self, place: int, *, on_host: bool = False) -> Tensor:
        tiles = self._held[place].clone() if place in self._resident else torch.empty_like(self._held[place])
        if place not in self._resident:
            tiles[: self.top] = self._held[place][: self.top]
            self._store.read(place, 0, tiles[self.top :].flatten(1))
        return tiles

    def leave(self, place: int) -> None:
        self._held[place] = self._maps[place] = None
        self._resident.discard(place)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)


def sizes_on(device: torch.device, linear: PlanesLinear) -> Sizes:
    """Of a layer in the tiles of a device."""
    out, inputs, count, group = linear.out_features, linear.in_features, linear.num_planes, linear.group_size
    if device.type == "cuda":
        (pairs, chunks, _), _ = tiles_cuda.shapes(out, inputs, count, group)
        plane = pairs * chunks * 2 * tiles_cuda.PLANE_BYTES
        beside = pairs * chunks * tiles_cuda.pair_bytes(0, group)
        return Sizes(plane, beside, count, out % PAIR_OUTPUTS == 0)
    outputs = num_tiles(out) * TILE_OUTPUTS
    return Sizes(outputs * inputs // 8, outputs * inputs // group * 2, count, outputs == out)
