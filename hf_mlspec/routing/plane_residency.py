"""Which low planes stay on the device, under a budget of bytes? Those of the layers that are read most.

Of a layer the first low planes stay, as many as a product brought: where a router reads six planes of eight, the other
two take no room.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator

from ..nn.plane_source import InGraph
from .plane_counting import PlaneCounting
from .plane_rooms import Fetch, Layer, Room, Sizes

_AGING = 0.9  # of what was read, pass by pass
_CLEARLY = 1.25  # how much more a layer has to be read than the one whose place it takes


class Residency:
    """Of the layers of one loader. used: bytes now, with those that are always there. missing: layers of whose last
    product low planes are not resident. graphs: that hold addresses: while there is one, nothing comes or goes."""

    def __init__(self, sizes: list[Sizes], top: int, budget: int, always: int, counting: PlaneCounting):
        self.sizes, self.top, self.budget, self.used = sizes, top, budget, always
        self.layers: list[Layer] = []
        self.missing = 0
        self.graphs: weakref.WeakSet[InGraph] = weakref.WeakSet()
        self._counting = counting

    def bytes_of(self, place: int, count: int) -> int:
        """Of so many planes of a layer."""
        return self.sizes[place].plane * count

    def take(self, layer: Layer) -> None:
        """The next layer; what it keeps is counted."""
        self.used += self.bytes_of(layer.place, layer.kept)
        self.missing += layer.lacks > 0
        self.layers.append(layer)

    def change(self, layer: Layer, *, kept: int | None = None, last: int | None = None) -> None:
        """Another number of planes of a layer stay, or were read last."""
        self.missing -= layer.lacks > 0
        if kept is not None:
            self.used += self.bytes_of(layer.place, kept - layer.kept)
            layer.kept = kept
        if last is not None:
            layer.last = last
        self.missing += layer.lacks > 0

    def leave(self, layer: Layer) -> None:
        """It holds its own planes again."""
        own = self.sizes[layer.place]
        self.change(layer, kept=0, last=self.top)
        self.used -= self.top * own.plane + own.beside

    def read(self, layer: Layer, count: int, new_pass: bool) -> None:
        """So many low planes of a layer are read."""
        if new_pass:
            for own in self.layers:
                own.reads *= _AGING
        layer.reads += count
        layer.most = max(float(count), layer.most * _AGING)
        self.change(layer, last=self.top + count)

    def keep(self, room: Room, layer: Layer, fetch: Fetch, awaited: Collection[int] = ()) -> bool:
        """Keep what was fetched where it is read more than what is resident; whether it stays. awaited: places of
        layers for which more is on its way, which is to stand behind what they keep: none of that may go. RuntimeError
        or MemoryError for want of memory."""
        if self.graphs or not self._make_room(room, layer, fetch.count, awaited):
            return False
        room.keep(fetch)
        self.change(layer, kept=fetch.first + fetch.count)
        return True

    def _make_room(self, room: Room, layer: Layer, count: int, awaited: Collection[int]) -> bool:
        """Whether planes of a layer may stay; layers that are read clearly less have lost theirs for it."""
        missing = self.used + self.bytes_of(layer.place, count) - self.budget
        victims, freed = [], 0
        for one, left in self._dearest_last(layer, awaited):
            if freed >= missing:
                break
            victims.append((one, left))
            freed += self.bytes_of(one.place, one.kept - left)
        if freed < missing:
            return False
        for one, left in victims:
            room.drop(one.place, left)
            self._counting.add(evicted=one.kept - left)
            self.change(one, kept=left)
        return True

    def _dearest_last(self, layer: Layer, awaited: Collection[int]) -> Iterator[tuple[Layer, int]]:
        """What may go for a layer's planes, and how many of each stay: all of layers that are read clearly less, of
        others those that nobody has read for some passes."""
        others = [own for own in self.layers if own.kept and own is not layer and own.place not in awaited]
        others.sort(key=lambda own: own.reads)
        less = [own for own in others if own.reads * _CLEARLY + 1 <= layer.reads]
        yield from ((own, 0) for own in less)
        unread = ((own, math.ceil(own.most)) for own in others[len(less) :])
        yield from ((own, most) for own, most in unread if most < own.kept)
