"""Which planes are on the device, and which come when? A budget of bytes, filled with what is read most.

The top planes of every layer are resident always. Of the low ones those stay whose layer's low planes are read most;
the others are fetched ahead of use: a pass asks layer after layer, and what it asks for teaches the loader which layer
follows which. Behind the last comes the first, so that the fetch for the next check begins while a draft, which reads
top planes only, still runs. What comes late delays a product and never changes it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from ..engines.capturing import capturing
from ..engines.memory import out_of_memory
from ..nn.plane_source import InGraph, PlaneCounts
from ..nn.planes import PlanesLinear
from .likely import LikelyWidths
from .plane_counting import PlaneCounting
from .plane_residency import Residency
from .plane_room_cuda import CudaRoom, GraphCopies
from .plane_rooms import Fetch, Layer, Room, sizes_on
from .plane_slots import always, require_budget, require_full, room_on
from .plane_store import PlaneError, PlaneStore

_REST = 64  # passes in which nothing more is kept, once there was no memory for it


class PlaneLoader:
    """The planes of a model's layers under a budget. See `PlaneSource`.

    Products of several threads take turns. counts: of all since `reset`.
    """

    def __init__(
        self, linears: Mapping[str, PlanesLinear], device: torch.device, budget: int, store: PlaneStore, *, top: int
    ):
        """linears: by name, in the order of a pass. budget: bytes on the device for planes, their scales, and what is
        fetched ahead. store: of the layers' low planes, empty as yet. top: planes that are always resident.
        ValueError as `require_budget`, before anything is allocated."""
        self.device, self.budget, self.top, self.store = device, budget, top, store
        self.sizes = [sizes_on(device, linear) for linear in linears.values()]
        kind = room_on(device)
        self.slots = require_budget(linears, device, budget, top)
        self.always = always(self.sizes, top) + kind.needed(self.sizes, top, self.slots)
        self._counting = PlaneCounting()
        self.likely: weakref.WeakKeyDictionary[nn.Module, LikelyWidths] = weakref.WeakKeyDictionary()
        more = (device,) if kind is CudaRoom else ()
        self.room: Room = kind(self.sizes, top, self.slots, store, *more)
        self.residency = Residency(self.sizes, top, budget, self.always, self._counting)
        self.layers = self.residency.layers
        self._lock = threading.RLock()
        self._waiting: dict[int, Fetch] = {}  # fetched ahead, by place
        self._free = list(range(self.slots))
        self._open = True
        self._before = self._next = -1  # the last layer asked for, and the last one fetched ahead
        self._rest = 0  # passes until layers are kept again
        self._copies: GraphCopies | None = None  # of the graph that is captured now
        self._place_of: dict[PlanesLinear, int] = {}
        self._after = {place: (place + 1) % len(linears) for place in range(len(linears))}
        try:
            for name, linear in linears.items():
                self._take(name, linear)
            store.seal()
        except BaseException:
            self.give_back(home=True)
            raise

    def _take(self, name: str, linear: PlanesLinear) -> None:
        """The last thing that can fail leaves the layer as it was."""
        place, weight = len(self.layers), linear.packed_weight()
        disk = weight.weight_planes.to(self.device), weight.weight_scale.to(self.device)
        try:
            planes, scale = linear.packing.prepack(*disk, weight.weight_zero_doubled)[:2]
            fits = self.used + self._low(place) <= self.budget
            layer = Layer(linear, place, self.top, linear.num_planes - self.top if fits else 0)
            self.store.put(place, self.room.put(place, planes, layer.resident))
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) or out_of_memory(error):
                raise OSError(f"there is no place for the planes of {name}: {error}") from error
            raise
        empty = planes.new_empty((*planes.shape[:2], 0) if planes.dim() == 3 else (0, *planes.shape[1:]))
        linear.stream_(self, (empty, scale))
        self.residency.take(layer)
        self._place_of[linear] = place

    @torch.no_grad()
    def give_back(self, *, home: bool = False) -> None:
        """End: every layer holds all its planes again, on the device or (home) where they were before. Where that
        fails, layers that are left go on as they were, and a second call goes on with them."""
        with capturing, self._lock:
            self.reset()
            for linear, place in list(self._place_of.items()):
                origin = self.layers[place].home if home else self.device
                moves = origin != self.device  # there may be no memory on the device: it is why they go home
                tiles = self.room.whole(place, on_host=moves), linear.weight_scale.data
                if moves:
                    parts = linear.packing.unprepack(*(own.to(origin) for own in tiles), None, linear.out_features)
                    tiles = linear.packing.prepack(*parts[:2], None)[:2]
                linear.stream_(None, tiles)
                self._left(self.layers[place])
            self.close()

    def _left(self, layer: Layer) -> None:
        """A layer that holds its own planes again is none of the loader's."""
        del self._place_of[layer.linear]
        self.room.leave(layer.place)
        self.residency.leave(layer)

    def _low(self, place: int) -> int:
        """Bytes of the low planes of a layer."""
        return self.residency.bytes_of(place, self.sizes[place].planes - self.top)

    @property
    def _missing(self) -> int:
        return self.residency.missing

    @property
    def counts(self) -> PlaneCounts:
        """Of all since `reset`."""
        return self._counting.total

    @property
    def used(self) -> int:
        """Bytes on the device now, slots included."""
        return self.residency.used

    @contextmanager
    def reading(self, linear: PlanesLinear, num_planes: int) -> Iterator[tuple[Tensor | None, ...]]:
        """As `PlaneSource.reading`. PlaneError where planes cannot be had; the next call asks for them again."""
        if not 1 <= num_planes <= linear.num_planes:
            raise ValueError(f"{num_planes} planes asked for, the weight has {linear.num_planes}")
        with self._lock:
            layer = self._known(linear)
            if self._copies is not None and torch.cuda.is_current_stream_capturing():
                if num_planes > self.top:
                    self.residency.graphs.add(self._copies.fetches)
                with self.room.tiles_in_graph(layer.place, num_planes, self._copies) as (tiles, *apart):
                    yield tiles, linear.weight_scale, *apart
                return
            fetch = self._fetched(layer, num_planes)
            try:
                tiles, *apart = self.room.tiles(layer.place, num_planes, fetch)
                yield tiles, linear.weight_scale, *apart
            except BaseException:
                if fetch is not None:
                    self._release(fetch)
                raise
            if fetch is not None:
                self._used(layer, fetch)
            self._fetch_ahead(num_planes > self.top)

    @property
    def copies_in_graphs(self) -> bool:
        """As of `PlaneSource`."""
        return self.room.copies_in_graphs

    @contextmanager
    def captured(self) -> Iterator[InGraph]:
        """As `PlaneSource.captured`."""
        with self._lock:
            self._copies = self.room.begin_graph()
            fetches = self._copies.fetches
        try:
            yield fetches
        finally:
            with self._lock:
                self._copies = None

    @contextmanager
    def replaying(self, fetches: InGraph) -> Iterator[None]:
        """As `PlaneSource.replaying`."""
        with self._lock:
            if not self._open:
                raise PlaneError("the planes of this model are no longer streamed: load the model again")
            self._drop_waiting()
            with self.room.lent():
                yield
            self._counting.add(**vars(fetches))

    def _drop_waiting(self) -> None:
        while self._waiting:
            self._release(self._waiting.popitem()[1])

    def alone(self) -> AbstractContextManager:
        """As `PlaneSource.alone`."""
        return self._lock

    def resident(self, linears: Sequence[PlanesLinear]) -> list[tuple[Tensor, Tensor, int]]:
        """As `PlaneSource.resident`."""
        with self._lock:
            found = self.room.tops([self._known(linear).place for linear in linears])
        outputs = [linear.out_features for linear in linears]
        if len(found) == 1:
            return [(found[0], linears[0].weight_scale, sum(outputs))]
        scales = [linear.weight_scale for linear in linears]
        return list(zip(found, scales, outputs, strict=True))

    def _known(self, linear: PlanesLinear) -> Layer:
        if not self._open:
            raise PlaneError("the planes of this model are no longer streamed: load the model again")
        if linear not in self._place_of:
            raise PlaneError(f"the planes of {linear} are not streamed here: end it, stream_planes(model, None)")
        return self.layers[self._place_of[linear]]

    def _fetched(self, layer: Layer, width: int) -> Fetch | None:
        """The low planes of a product that are not resident, waited for; None where nothing is missing."""
        if width <= self.top:
            return None
        before, count = self._before, width - self.top
        self._follow(layer)
        self.residency.read(layer, count, layer.place <= before)
        had = min(layer.kept, count)
        if had:
            self._counting.add(hits=had)
        if had == count:
            return None
        fetch = self._waiting.pop(layer.place, None)
        if fetch is not None and fetch.first + fetch.count < count:
            self._release(fetch)
            fetch = None
        when = "late" if fetch is None else "ahead"
        fetch = fetch or self._start(layer.place, had, count - had)
        try:
            self.room.wait(fetch, self._counting.stalled)
        except BaseException:
            self._release(fetch)
            raise
        self._counting.add(**{"fetched_bytes": fetch.count * self.sizes[layer.place].plane, when: count - had})
        return fetch

    def _follow(self, layer: Layer) -> None:
        """Learn which layer is asked for behind which, and let go of what came for layers in between."""
        before, now = self._before, layer.place
        if before >= 0:
            self._after[before] = now
        if now <= before:
            self._rest = max(self._rest - 1, 0)
        for place in [own for own in self._waiting if (before < own < now if now > before else own > before)]:
            self._release(self._waiting.pop(place))
            self.residency.change(self.layers[place], last=self.top)
        self._before = now

    def _start(self, place: int, first: int, count: int) -> Fetch:
        if not self._free:
            self._release(self._waiting.pop(next(reversed(self._waiting))))  # what is needed last
        fetch = Fetch(place, first, count, self._free.pop(0))
        try:
            self.room.start(fetch)
        except BaseException:
            self._free.append(fetch.slot)
            raise
        return fetch

    def _release(self, fetch: Fetch, kept: bool = False) -> None:
        try:
            self.room.done(fetch, kept)
        finally:
            self._free.append(fetch.slot)

    def _used(self, layer: Layer, fetch: Fetch) -> None:
        """What was fetched may stay; its slot is free again in any case. The product is done: for want of memory it
        does not fail, and for some passes nothing more is kept."""
        stays = False
        try:
            stays = not self._rest and self.residency.keep(self.room, layer, fetch, self._waiting)
        except (MemoryError, RuntimeError) as error:
            require_full(error, self.layers[0].linear, "to keep planes")
            self._rest = _REST
        finally:
            self._release(fetch, stays)

    def _fetch_ahead(self, read_low: bool) -> None:
        """Start what comes next, as far as slots go. A draft that reads top planes changes nothing of it."""
        if not read_low and self._waiting:
            return
        at = self._next if self._waiting else max(self._before, -1)
        for _ in range(len(self.layers)):
            if not self._free or len(self._waiting) >= self._missing:
                return
            at = self._after.get(at, 0)
            layer = self.layers[at]
            if layer.lacks > 0 and layer.linear in self._place_of and at not in self._waiting and at != self._before:
                if not self._begin(layer):
                    return
                self._next = at

    def _begin(self, layer: Layer) -> bool:
        """Start the fetch of what a layer lacks, ahead of its product; False where there is no memory for it."""
        if not self._waiting:
            self._next = self._before  # what follows is sought from the last product on
        try:
            self._waiting[layer.place] = self._start(layer.place, layer.kept, layer.lacks)
        except (MemoryError, RuntimeError) as error:
            require_full(error, self.layers[0].linear, "to fetch planes ahead")
            return False
        return True

    def expect(self, linear: PlanesLinear, num_planes: int) -> None:
        """As `PlaneSource.expect`; a fetch that brings fewer, or what nobody will read, is let go of."""
        with self._lock:
            layer = self._known(linear)
            self.residency.change(layer, last=max(num_planes, self.top))
            fetch = self._waiting.get(layer.place)
            if fetch is not None and not 0 < layer.lacks <= fetch.first + fetch.count - layer.kept:
                self._release(self._waiting.pop(layer.place))
                fetch = None
            if fetch is None and layer.lacks and self._free and layer.place != self._before:
                self._begin(layer)

    def counting(self) -> AbstractContextManager[PlaneCounts]:
        """As `PlaneSource.counting`."""
        return self._counting.block(self._lock)

    @torch.no_grad()
    def whole(self, linear: PlanesLinear) -> tuple[Tensor, Tensor]:
        """As `PlaneSource.whole`."""
        with self._lock:
            return self.room.whole(self._known(linear).place), linear.weight_scale.data

    def reset(self) -> None:
        """Drop what is on its way, and set the counts to zero; resident planes stay."""
        with self._lock:
            self._drop_waiting()
            self._before = self._next = -1
            self._counting.reset()

    def close(self) -> None:
        """End: nothing is held any longer, and the layers cannot be used. A second call does nothing."""
        with capturing, self._lock:  # the room waits for its device
            if not self._open:
                return
            try:
                self.reset()
            finally:
                self._open, self.residency.used = False, 0
                self.room.close()
                self.store.close(lost=bool(getattr(self.room, "lost", "")))

    def __reduce__(self) -> tuple:
        raise TypeError(
            "a model whose planes are streamed cannot be copied or pickled: save it with save_pretrained, or end the "
            "streaming with hf_mlspec.stream_planes(model, None)"
        )
