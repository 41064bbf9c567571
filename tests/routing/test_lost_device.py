"""Is a GPU that is lost an error that says so, whatever is asked of it then, and are other errors left as they are?

tests/cuda/test_streamed_planes.py loses one.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_mlspec.routing.lost_device import survives_loss, tells_loss
from hf_mlspec.routing.plane_counting import PlaneCounting
from hf_mlspec.routing.plane_room_cuda import CudaRoom
from hf_mlspec.routing.plane_store import HostStore, PlaneError

ASSERTED = "CUDA error: device-side assert triggered"


class Room:
    """error: what the device answers."""

    device, lost = torch.device("cuda:3"), ""

    def __init__(self, error):
        self.error, self.asked = error, 0

    @tells_loss
    def read(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return 5

    @survives_loss
    def close(self):
        self.asked += 1
        raise self.error


@pytest.fixture
def device(monkeypatch):
    """Answers nothing but errors behind the first one, where ``gone``."""
    state = {"gone": True}

    def synchronize(of):
        assert of == Room.device
        if state["gone"]:
            raise torch.AcceleratorError(ASSERTED)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return state


def test_a_lost_device_is_named_by_every_call_and_what_gives_back_ends(device):
    room = Room(torch.AcceleratorError(f"{ASSERTED}\nand many words"))
    for _ in range(2):
        with pytest.raises(PlaneError, match=rf"cuda:3, .*was lost \({ASSERTED}\).*start a new process"):
            room.read()
    assert room.close() is None
    assert room.asked == 1  # the device was asked no more


@pytest.mark.parametrize(
    ("error", "gone"),
    [(torch.AcceleratorError("CUDA error: invalid argument"), False),
     (torch.OutOfMemoryError("CUDA out of memory"), True), (RuntimeError("shapes differ"), True),
     (PlaneError("the file ends"), True), (ValueError("no width"), True)],
)  # fmt: skip
def test_other_errors_are_what_they_were(device, error, gone):
    device["gone"] = gone
    room = Room(error)
    for call in (room.read, room.close):
        with pytest.raises(type(error)) as told:
            call()
        assert told.value is error
    room.error = None
    assert room.read() == 5


def test_waits_on_a_lost_device_are_counted_as_none():
    class Event:
        def synchronize(self):
            raise torch.AcceleratorError(ASSERTED)

    counting = PlaneCounting()
    with counting.block(threading.RLock()) as own:
        counting.stalled((Event(), Event()))
        counting.add(hits=2)
    assert (own.hits, own.stall_seconds) == (2, 0.0)
    assert not counting._stalls


@pytest.mark.parametrize("lost", [False, True])
def test_pinned_memory_outlives_a_lost_gpu(lost):
    """Its destructor asks the GPU, and ends the process."""
    store = HostStore([(2, 16)], pin=False)
    store.put(0, torch.ones(2, 16, dtype=torch.uint8))
    store.pinned, held = True, weakref.ref(store._held[0])
    for _ in range(2):
        store.close(lost=lost)
    assert store._held == []
    assert (held() is not None) == lost


@pytest.mark.parametrize("lost", ["", "before", "when it ends"])
def test_what_planes_of_a_file_pass_through_outlives_a_lost_gpu_and_their_thread_ends(monkeypatch, lost):
    def synchronize(_):
        assert lost != "before"  # it is asked no more
        if lost:
            raise torch.AcceleratorError(ASSERTED)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    room = CudaRoom.__new__(CudaRoom)
    room.device, room.lost, room._bounce = Room.device, ASSERTED if lost == "before" else "", torch.ones(8)
    room._reader, held = ThreadPoolExecutor(1), weakref.ref(room._bounce)
    for _ in range(2):
        room.close()
    assert bool(room.lost) == bool(lost)
    assert (held() is not None) == bool(lost)
    with pytest.raises(RuntimeError, match="shutdown"):
        room._reader.submit(int)
