"""How are streamed planes held on a GPU? Tiles of the top planes for good, and low planes apart from them.

The tiles of top planes stay where they are, so that a draft can be captured over them. A product that reads low
planes, too, takes them from where they lie: resident ones from memory of their own, others from a slot, to which a
stream of copies brought them. A CUDA graph holds those copies as nodes of a branch of their own: from pinned memory to
the slots, each behind the product that last read its slot, so that the first ones run while the graph does something
else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engines.cuda.neighbours import neighbours
from ..nn.plane_source import InGraph
from ..ops.planes import tiles_cuda
from .lost_device import survives_loss, tells_loss
from .plane_rooms import CpuRoom, Fetch, Sizes
from .plane_store import PlaneStore, leave_to_the_process


@dataclass
class GraphCopies:
    """Of a graph that is captured. begin: in front of all of it. read: of every slot, behind what read it last. turn:
    copies so far."""

    begin: torch.cuda.Event
    branch: torch.cuda.Stream
    read: dict[int, torch.cuda.Event] = field(default_factory=dict)
    turn: int = 0
    fetches: InGraph = field(default_factory=InGraph)


class CudaRoom:
    """On a GPU. Copies run on a stream of their own and wait for the product that last read their slot."""

    def __init__(self, sizes: list[Sizes], top: int, slots: int, store: PlaneStore, device: torch.device):
        self.top, self._sizes, self._store, self.device = top, sizes, store, device
        self._top: list[Tensor | None] = []  # tiles of top planes
        self._low: list[Tensor | None] = []  # low planes that are resident, as the store has them
        self._copies = torch.cuda.Stream(device)
        low = max(one.plane * (one.planes - top) for one in sizes)
        self._slots = [torch.empty(low, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._read: list[torch.cuda.Event | None] = [None] * slots  # by a product
        self._events = [(torch.cuda.Event(), torch.cuda.Event()) for _ in range(slots)]  # come, read
        self._stream: torch.cuda.Stream | None = None  # of the last product
        self._views: dict[tuple[int, int, int], Tensor] = {}  # of a slot: planes, bytes of one
        self._reader = None if store.word == "memory" else ThreadPoolExecutor(1, "mlspec-planes")
        self._bounce = torch.empty(low, dtype=torch.uint8, pin_memory=True) if self._reader else None
        self.lost = ""  # what the device said when it was

    @property
    def copies_in_graphs(self) -> bool:
        """Whether planes come from where a graph can copy them."""
        return self._reader is None and self._store.pinned

    @staticmethod
    def needed(sizes: list[Sizes], top: int, slots: int) -> int:
        """As CpuRoom.needed."""
        return CpuRoom.needed(sizes, top, slots)

    def put(self, place: int, tiles: Tensor, resident: bool) -> Tensor:
        """As CpuRoom.put; tiles ``[pairs, chunks, bytes]`` on the device."""
        halves, count = self._halves(tiles), self._sizes[place].planes - self.top
        top = halves[..., : self._front(tiles) + self.top * tiles_cuda.PLANE_BYTES].flatten(2).contiguous()
        low = self._planes(tiles, self.top, count).permute(3, 0, 1, 2, 4).flatten(1)  # of planes
        self._top.append(top)
        self._low.append(low if resident else None)
        return low

    def _halves(self, tiles: Tensor) -> Tensor:
        return tiles.unflatten(2, (2, tiles.shape[2] // 2))

    def _front(self, tiles: Tensor) -> int:
        return tiles.shape[2] // 2 % tiles_cuda.PLANE_BYTES  # scales of a tile take less than a plane

    def _planes(self, tiles: Tensor, first: int, count: int) -> Tensor:
        """Some planes in tiles: ``[pairs, chunks, 2, count, bytes]``."""
        begin = self._front(tiles) + first * tiles_cuda.PLANE_BYTES
        part = self._halves(tiles)[..., begin : begin + count * tiles_cuda.PLANE_BYTES]
        return part.unflatten(-1, (count, tiles_cuda.PLANE_BYTES))

    @tells_loss
    def start(self, fetch: Fetch) -> None:
        fetch.event = self._events[fetch.slot][0]
        if self._reader is None:
            self._copy(fetch, self._store.planes(fetch.place, fetch.first, fetch.count))
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
        self._store.read(fetch.place, fetch.first, into)
        self._copy(fetch, into)
        fetch.event.synchronize()  # the next read writes over it

    @tells_loss
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

    @tells_loss
    def tiles(self, place: int, width: int, fetch: Fetch | None) -> Sequence[Tensor | None]:
        if width <= self.top:
            return (self._top[place],)
        self._behind_the_last()
        if fetch is None:
            return self._top[place], self._low[place]
        resident = self._low[place][: fetch.first] if fetch.first else None
        return self._top[place], resident, self._brought(fetch.slot, place, fetch.count)

    def _brought(self, slot: int, place: int, count: int) -> Tensor:
        """Low planes of a layer in a slot. Views are kept: to make one takes as long as to launch a kernel."""
        size = self._sizes[place].plane
        key = slot, count, size
        if key not in self._views:
            self._views[key] = self._slots[slot][: count * size].view(count, size)
        return self._views[key]

    def begin_graph(self) -> GraphCopies:
        """Before anything is captured on the current stream that `tiles_in_graph` is called for."""
        begin = torch.cuda.Event()
        begin.record(torch.cuda.current_stream(self.device))
        return GraphCopies(begin, torch.cuda.Stream(self.device))

    @contextmanager
    def tiles_in_graph(self, place: int, width: int, copies: GraphCopies) -> Iterator[Sequence[Tensor | None]]:
        """As `tiles`, for products inside of the block, while a graph is captured: what is not resident is copied by
        the graph."""
        if width <= self.top:
            yield (self._top[place],)
            return
        count, low, stream = width - self.top, self._low[place], torch.cuda.current_stream(self.device)
        had = 0 if low is None else min(len(low), count)
        copies.fetches.hits += had
        if had == count:
            yield self._top[place], low
            return
        slot = copies.turn % len(self._slots)
        copies.turn += 1
        self._copy_in_graph(slot, self._store.planes(place, had, count - had), copies)
        copies.fetches.ahead += count - had
        yield self._top[place], low[:had] if had else None, self._brought(slot, place, count - had)
        copies.read[slot] = torch.cuda.Event()
        copies.read[slot].record(stream)

    def _copy_in_graph(self, slot: int, planes: Tensor, copies: GraphCopies) -> None:
        """On the graph's branch, behind what read the slot last; the current stream waits for it."""
        come = torch.cuda.Event()
        copies.fetches.fetched_bytes += planes.numel()
        copies.branch.wait_event(copies.read.get(slot, copies.begin))
        with torch.cuda.stream(copies.branch):
            self._slots[slot][: planes.numel()].copy_(planes.flatten(), non_blocking=True)
            come.record(copies.branch)
        torch.cuda.current_stream(self.device).wait_event(come)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A block that launches a graph over slots; none of the slots holds a fetch."""
        self._behind_the_last()
        stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(self._copies)
        try:
            yield
        finally:
            done = torch.cuda.Event()
            done.record(stream)
            self._read = [done] * len(self._slots)

    def _behind_the_last(self) -> None:
        """Products of another stream may still write what stays from now on."""
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def tops(self, places: Sequence[int]) -> list[Tensor]:
        """As CpuRoom.tops; moves them where they do not lie side by side as yet: the device is to be idle."""
        found = [self._top[place] for place in places]
        fills = all(self._sizes[place].fills for place in places[:-1])
        if len(found) == 1 or not fills or len({own.shape[1:] for own in found}) > 1:
            return found
        whole = neighbours(found)
        if whole is None:
            with torch.inference_mode(False):
                whole = torch.cat(found)
            for place, own in zip(places, whole.split([len(own) for own in found]), strict=True):
                self._top[place] = own
        return [whole]

    @survives_loss
    def done(self, fetch: Fetch, kept: bool) -> None:
        if fetch.future is not None:
            Future.exception(fetch.future)
        event = self._events[fetch.slot][1]
        event.record(torch.cuda.current_stream(self.device))
        self._read[fetch.slot] = event

    @tells_loss
    def keep(self, fetch: Fetch) -> None:
        size = self._sizes[fetch.place].plane
        with torch.inference_mode(False):
            more, low = self._slots[fetch.slot][: fetch.count * size].view(-1, size), self._low[fetch.place]
            more = more.clone() if low is None else torch.cat([low, more])
        self._hold(fetch.place, more)

    @tells_loss
    def drop(self, place: int, left: int) -> None:
        with torch.inference_mode(False):
            self._hold(place, self._low[place][:left].clone() if left else None)

    def _hold(self, place: int, planes: Tensor | None) -> None:
        """These low planes of a layer are resident, in place of others."""
        low, self._low[place] = self._low[place], planes
        if low is not None and self._stream is not None:
            low.record_stream(self._stream)  # for others when the last product, which may have read it, has ended

    @tells_loss
    def whole(self, place: int, *, on_host: bool = False) -> Tensor:
        self._behind_the_last()
        own, device = self._sizes[place], torch.device("cpu") if on_host else self.device
        count, low = own.planes - self.top, self._low[place]
        if low is None or len(low) < count:
            low = torch.empty(count, own.plane, dtype=torch.uint8)
            self._store.read(place, 0, low)
        return tiles_cuda.joined(self._top[place].to(device), low.to(device))

    def leave(self, place: int) -> None:
        self._hold(place, None)
        self._top[place] = None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
        try:
            self._settle()
        finally:
            self._top, self._low, self._slots, self._views = [], [], [], {}
            if self.lost and self._bounce is not None:
                leave_to_the_process([self._bounce])
            self._bounce = None

    @survives_loss
    def _settle(self) -> None:
        torch.cuda.synchronize(self.device)  # the loader has seen to it that nobody captures
