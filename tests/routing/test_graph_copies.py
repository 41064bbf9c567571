"""Do the copies that a CUDA graph holds bring the right planes, and never write a slot that is still to be read?

The room of a GPU over tensors on the CPU: streams and events only note what happens before what.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from hf_mlspec.ops.planes import tiles_cuda
from hf_mlspec.routing.plane_room_cuda import CudaRoom
from hf_mlspec.routing.plane_rooms import Fetch, Sizes
from hf_mlspec.routing.plane_store import HostStore

TOP, PLANES, PAIRS, CHUNKS, FRONT = 3, 8, 2, 3, 16
CPU = torch.device("cpu")


class Stream:
    """known: what is done before the next thing on it begins."""

    now: Stream | None = None

    def __init__(self, *_):
        self.known: set[str] = set()

    def wait_event(self, event: Event) -> None:
        self.known |= event.known

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known


class Event:
    def __init__(self, **_):
        self.known: set[str] = set()

    def record(self, stream: Stream) -> None:
        self.known = set(stream.known)


class Store(HostStore):
    pinned = True

    def __init__(self, shapes):
        super().__init__(shapes, pin=False)
        self.pinned = True

    def _empty(self, shape):
        return torch.empty(shape, dtype=torch.uint8)


@pytest.fixture
def gpu(monkeypatch):
    main = Stream.now = Stream()

    @contextmanager
    def on(stream):
        before, Stream.now = Stream.now, stream
        yield
        Stream.now = before

    for name, found in {"Stream": Stream, "Event": Event, "stream": on}.items():
        monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.now)
    return main


def room_of(layers: int, slots: int, resident: dict[int, int]) -> tuple[CudaRoom, list[torch.Tensor]]:
    """resident: by place, so many low planes."""
    half = FRONT + PLANES * tiles_cuda.PLANE_BYTES
    tiles = [torch.randint(0, 256, (PAIRS, CHUNKS, 2 * half), dtype=torch.uint8) for _ in range(layers)]
    plane = PAIRS * CHUNKS * 2 * tiles_cuda.PLANE_BYTES
    sizes = [Sizes(plane, PAIRS * CHUNKS * 2 * FRONT, PLANES, True)] * layers
    store = Store([(PLANES - TOP, plane)] * layers)
    room = CudaRoom(sizes, TOP, slots, store, CPU)
    for place, own in enumerate(tiles):
        store.put(place, room.put(place, own, False))
        if count := resident.get(place):
            room._slots[0][: count * plane].copy_(store.planes(place, 0, count).flatten())
            room.keep(Fetch(place, 0, count, 0))
    return room, tiles


def noted(room: CudaRoom, monkeypatch) -> list[tuple[str, int, set[str]]]:
    """Reads of slots, and copies to them, with what was done before each."""
    notes, brought, planes = [], room._brought, room._store.planes

    def reads(slot, place, count):
        name = f"read {len(notes)}"
        notes.append((name, slot, set(Stream.now.known)))
        Stream.now.known.add(name)
        return brought(slot, place, count)

    class Copies:
        slot = 0

    def copies(place, first, count):
        found = planes(place, first, count)

        class Source:
            def numel(self):
                return found.numel()

            def flatten(self):
                name = f"copy {len(notes)}"
                notes.append((name, Copies.slot, set(Stream.now.known)))
                Copies.slot = (Copies.slot + 1) % len(room._slots)
                Stream.now.known.add(name)
                return found.flatten()

        return Source()

    monkeypatch.setattr(room, "_brought", reads)
    monkeypatch.setattr(room._store, "planes", copies)
    return notes


def joined(tiles: torch.Tensor, *apart: torch.Tensor | None) -> torch.Tensor:
    """As one weight of tiles."""
    planes = [own for own in apart if own is not None]
    return tiles_cuda.joined(tiles, torch.cat(planes)) if planes else tiles


def expected(tiles: torch.Tensor, width: int) -> torch.Tensor:
    half = FRONT + width * tiles_cuda.PLANE_BYTES
    return tiles.view(PAIRS, CHUNKS, 2, -1)[..., :half]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_copies_bring_every_width_and_wait_for_what_reads_their_slot(gpu, monkeypatch, slots):
    room, tiles = room_of(5, slots, {1: PLANES - TOP, 3: 2})
    notes, copies = noted(room, monkeypatch), room.begin_graph()
    for width in (8, 2, 5, 8, 4, 7):
        for place, own in enumerate(tiles):
            with room.tiles_in_graph(place, width, copies) as parts:
                found = joined(*parts)
            assert found.view(PAIRS, CHUNKS, 2, -1)[..., : expected(own, width).shape[-1]].equal(expected(own, width))
    assert copies.fetches.hits > 0
    moved = [note for note in notes if note[0].startswith("copy")]
    assert copies.turn == len(moved) > 3 * slots
    for index, (name, slot, before) in enumerate(notes):
        earlier = [note for note in notes[:index] if note[1] == slot]
        if name.startswith("copy"):
            assert {note[0] for note in earlier if note[0].startswith("read")} <= before, name
        else:
            assert [note[0] for note in earlier if note[0].startswith("copy")][-1] in before, name
    first = [before for name, _, before in moved[:slots]]
    assert not any(own.startswith("read") for before in first for own in before)  # they wait for no product


def test_a_graph_over_top_planes_copies_nothing(gpu):
    room, tiles = room_of(3, 2, {})
    copies = room.begin_graph()
    for place, own in enumerate(tiles):
        with room.tiles_in_graph(place, TOP, copies) as parts:
            assert joined(*parts).view(PAIRS, CHUNKS, 2, -1).equal(expected(own, TOP))
    assert (copies.turn, copies.fetches.reads_low) == (0, False)


def test_a_replay_is_behind_fetches_and_ahead_of_those_to_come(gpu):
    room, _ = room_of(3, 2, {})
    room._copies.known.add("a fetch before")
    with room.lent():
        assert "a fetch before" in gpu.known
        gpu.known.add("the replay")
    assert all("the replay" in event.known for event in room._read)
