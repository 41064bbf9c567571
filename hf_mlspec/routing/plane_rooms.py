"""How are streamed planes held on a device? Top planes always, low ones for as long as they are wanted.

A room holds the layers of one model. On the CPU each layer has the addresses of all its planes, and memory for those
that are there: low planes are read to their place and given back to the system. On a GPU the top planes are tiles of
their own; a layer whose low planes are resident has tiles of all planes, the others are put together in one working
tile from the top planes and from what a stream of copies brought.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..nn.planes import PlanesLinear
from ..ops.planes import tiles_cuda
from ..ops.tiles import TILE_OUTPUTS, num_tiles
from .plane_store import PlaneStore


class Sizes(NamedTuple):
    """Of a layer on its device: bytes of a plane, of the scales that lie with the planes, and planes."""

    plane: int
    beside: int
    planes: int


@dataclass
class Fetch:
    """Low planes on their way: ``count`` of them for the layer at ``place``, in ``slot`` of the room."""

    place: int
    count: int
    slot: int
    future: Future | None = None
    event: torch.cuda.Event | None = None


class Room(Protocol):
    """Layers on a device; see CpuRoom and CudaRoom."""

    def put(self, place: int, tiles: Tensor, resident: bool) -> Tensor:
        """Take over the tiles of the next layer; its low planes ``[planes, bytes]`` for the store."""

    def start(self, fetch: Fetch) -> None:
        """Begin to fetch; the host goes on."""

    def wait(self, fetch: Fetch, stalls: Callable) -> None:
        """Products after this find the planes. Raises what the fetch raised."""

    def tiles(self, place: int, width: int, fetch: Fetch | None) -> Tensor:
        """plane_tiles with the places of all planes, of which the first ``width`` are there."""

    def done(self, fetch: Fetch) -> None:
        """The product that the planes were fetched for was started: their slot is free for the next."""

    def keep(self, place: int, tiles: Tensor) -> None:
        """Low planes of ``tiles``, all of them, are resident from now on."""

    def drop(self, place: int) -> None:
        """They are no longer."""

    def worked(self) -> None:
        """The product that read tiles was started."""

    def close(self) -> None:
        """Give back what it holds."""


class CpuRoom:
    """On the CPU; memory is given back page by page, so only on Linux."""

    def __init__(self, sizes: list[Sizes], top: int, slots: int, store: PlaneStore):
        if not sys.platform.startswith("linux"):
            raise ValueError(f"planes are streamed to the CPU on Linux only, not on {sys.platform}: leave it out")
        self.top, self._sizes, self._store = top, sizes, store
        self._maps: list[mmap.mmap] = []
        self._held: list[Tensor] = []
        self._reader = ThreadPoolExecutor(1, "mlspec-planes")

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
        return tiles[self.top :].flatten(1)

    def start(self, fetch: Fetch) -> None:
        into = self._held[fetch.place][self.top : self.top + fetch.count].flatten(1)
        fetch.future = self._reader.submit(self._store.read, fetch.place, 0, into)

    def wait(self, fetch: Fetch, stalls: Callable[[float], None]) -> None:
        if not fetch.future.done():
            begin = time.perf_counter()
            Future.exception(fetch.future)
            stalls(time.perf_counter() - begin)
        fetch.future.result()

    def tiles(self, place: int, width: int, fetch: Fetch | None) -> Tensor:
        return self._held[place]

    def done(self, fetch: Fetch) -> None:
        fetch.future.cancel()
        if not fetch.future.cancelled():
            Future.exception(fetch.future)  # it may still write
        self.drop(fetch.place)

    def keep(self, place: int, tiles: Tensor) -> None:
        """They are where they were read to."""

    def worked(self) -> None:
        """A product has ended when its call returns."""

    def drop(self, place: int) -> None:
        own = self._sizes[place]
        first = -(-self.top * own.plane // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only
        length = (own.planes * own.plane - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self._maps[place].madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)


class CudaRoom:
    """On a GPU. Copies run on a stream of their own and wait for the product that last read their slot."""

    def __init__(self, sizes: list[Sizes], top: int, slots: int, store: PlaneStore, device: torch.device):
        self.top, self._sizes, self._store, self.device = top, sizes, store, device
        self._top: list[Tensor | None] = []  # tiles of top planes, None where all are resident
        self._full: list[Tensor | None] = []
        self._copies = torch.cuda.Stream(device)
        low = max(one.plane * (one.planes - top) for one in sizes)
        self._slots = [torch.empty(low, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._read: list[torch.cuda.Event | None] = [None] * slots  # by a product
        self._events = [(torch.cuda.Event(), torch.cuda.Event()) for _ in range(slots)]  # come, read
        self._work = torch.empty(max(_whole(one) for one in sizes), dtype=torch.uint8, device=device)
        self._stream: torch.cuda.Stream | None = None  # of the last product
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # the working tile of a layer, and its top planes
        self._ways: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # from a slot to the working tile
        self._reader = None if store.word == "memory" else ThreadPoolExecutor(1, "mlspec-planes")
        self._bounce = torch.empty(low, dtype=torch.uint8, pin_memory=True) if self._reader else None

    @staticmethod
    def needed(sizes: list[Sizes], top: int, slots: int) -> int:
        """Bytes beside top and resident planes: the slots and the working tile."""
        return CpuRoom.needed(sizes, top, slots) + max(_whole(one) for one in sizes)

    def put(self, place: int, tiles: Tensor, resident: bool) -> Tensor:
        """As CpuRoom.put; tiles ``[pairs, chunks, bytes]`` on the device."""
        self._full.append(tiles if resident else None)
        self._top.append(None if resident else self._tops(tiles))
        low = self._planes(tiles, self.top, len(range(self.top, self._sizes[place].planes)))
        return low.permute(3, 0, 1, 2, 4).flatten(1)  # of planes

    def _halves(self, tiles: Tensor) -> Tensor:
        return tiles.unflatten(2, (2, tiles.shape[2] // 2))

    def _tops(self, tiles: Tensor) -> Tensor:
        halves, own = self._halves(tiles), self._front(tiles)
        return halves[..., : own + self.top * tiles_cuda.PLANE_BYTES].contiguous()

    def _front(self, tiles: Tensor) -> int:
        return tiles.shape[2] // 2 % tiles_cuda.PLANE_BYTES  # scales of a tile take less than a plane

    def _planes(self, tiles: Tensor, first: int, count: int) -> Tensor:
        """Some planes in tiles: ``[pairs, chunks, 2, count, bytes]``."""
        begin = self._front(tiles) + first * tiles_cuda.PLANE_BYTES
        part = self._halves(tiles)[..., begin : begin + count * tiles_cuda.PLANE_BYTES]
        return part.unflatten(-1, (count, tiles_cuda.PLANE_BYTES))

    def start(self, fetch: Fetch) -> None:
        fetch.event = self._events[fetch.slot][0]
        if self._reader is None:
            self._copy(fetch, self._store.planes(fetch.place, 0, fetch.count))
        else:
            fetch.future = self._reader.submit(self._through_host, fetch)

    def _copy(self, fetch: Fetch, planes: Tensor) -> None:
        with torch.cuda.stream(self._copies):
            if self._read[fetch.slot] is not None:
                self._copies.wait_event(self._read[fetch.slot])
            self._slots[fetch.slot][: planes.numel()].copy_(planes.flatten(), non_blocking=True)
            fetch.event.record(self._copies)

    def _through_host(self, fetch: Fetch) -> None:
        size = self._sizes[fetch.place].plane
        into = self._bounce[: fetch.count * size].view(fetch.count, size)
        self._store.read(fetch.place, 0, into)
        self._copy(fetch, into)
        fetch.event.synchronize()  # the next read writes over it

    def wait(self, fetch: Fetch, stalls: Callable[[float | tuple], None]) -> None:
        if fetch.future is not None:
            begin = time.perf_counter()
            Future.exception(fetch.future)
            stalls(time.perf_counter() - begin)
            fetch.future.result()
        stream = torch.cuda.current_stream(self.device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(fetch.event)
        after.record(stream)
        stalls((before, after))

    def tiles(self, place: int, width: int, fetch: Fetch | None) -> Tensor:
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # it may still read the working tile, or write what stays from now on
        self._stream = stream
        if self._full[place] is not None:
            return self._full[place]
        work, tops = self._views.get(place) or self._viewed(place)
        tops.copy_(self._top[place])
        if fetch is not None:
            into, low = self._way(place, fetch)
            into.copy_(low)
        return work

    def _viewed(self, place: int) -> tuple[Tensor, Tensor]:
        """Views are kept: to make them for every product takes longer than the copies."""
        pairs, chunks, _, had = self._top[place].shape
        tile = had + (self._sizes[place].planes - self.top) * tiles_cuda.PLANE_BYTES
        work = self._work[: pairs * chunks * 2 * tile].view(pairs, chunks, 2 * tile)
        self._views[place] = work, self._halves(work)[..., :had]
        return self._views[place]

    def _way(self, place: int, fetch: Fetch) -> tuple[Tensor, Tensor]:
        found = self._ways.get((place, fetch.slot, fetch.count))
        if found is None:
            work, count = self._views[place][0], fetch.count
            low = self._slots[fetch.slot][: count * self._sizes[place].plane]
            low = low.view(count, *work.shape[:2], 2, tiles_cuda.PLANE_BYTES).permute(1, 2, 3, 0, 4)
            found = self._ways[place, fetch.slot, count] = self._planes(work, self.top, count), low
        return found

    def worked(self) -> None:
        """The next product comes behind this one in its stream, or waits for that."""

    def done(self, fetch: Fetch) -> None:
        if fetch.future is not None:
            Future.exception(fetch.future)
        event = self._events[fetch.slot][1]
        event.record(torch.cuda.current_stream(self.device))
        self._read[fetch.slot] = event

    def keep(self, place: int, tiles: Tensor) -> None:
        with torch.inference_mode(False):
            self._left(self._top[place])
            self._full[place], self._top[place] = tiles.clone(), None

    def drop(self, place: int) -> None:
        if (full := self._full[place]) is not None:
            self._top[place], self._full[place] = self._tops(full), None
            self._left(full)

    def _left(self, tiles: Tensor) -> None:
        """Its memory is for others when the last product, which may have read it on another stream, has ended."""
        if self._stream is not None:
            tiles.record_stream(self._stream)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
        torch.cuda.synchronize(self.device)
        self._top, self._full, self._slots, self._work = [], [], [], None
        self._views, self._ways = {}, {}


def _whole(sizes: Sizes) -> int:
    return sizes.planes * sizes.plane + sizes.beside


def sizes_on(device: torch.device, linear: PlanesLinear) -> Sizes:
    """Of a layer in the tiles of a device."""
    out, inputs, count, group = linear.out_features, linear.in_features, linear.num_planes, linear.group_size
    if device.type == "cuda":
        (pairs, chunks, _), _ = tiles_cuda.shapes(out, inputs, count, group)
        plane = pairs * chunks * 2 * tiles_cuda.PLANE_BYTES
        return Sizes(plane, pairs * chunks * tiles_cuda.pair_bytes(0, group), count)
    outputs = num_tiles(out) * TILE_OUTPUTS
    return Sizes(outputs * inputs // 8, outputs * inputs // group * 2, count)
