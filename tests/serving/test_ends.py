"""Do the two ends of a connection ever wait for each other, and does either one leave something behind?"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading

import pytest

from hf_mlspec.serving.backend_end import BackendEnd
from hf_mlspec.serving.errors import ApiError
from hf_mlspec.serving.http_end import HttpEnd
from hf_mlspec.serving.messages import Ask, State


class Taking:
    """A backend that takes everything and decodes nothing."""

    def __init__(self) -> None:
        self.taken, self.cancelled = 0, False
        self.state = State(None, None, 0, 0)

    def submit(self, tickets) -> None:
        self.taken += len(tickets)

    def cancel(self) -> None:
        self.cancelled = True


class Watch:
    def text(self) -> bytes:
        raise RuntimeError("a defect")


def ends() -> tuple[Taking, BackendEnd, HttpEnd]:
    own, other = multiprocessing.Pipe()
    backend, end = Taking(), BackendEnd(own)
    end.serve(backend, Watch())
    return backend, end, HttpEnd(other)


def test_more_at_once_than_a_connection_holds():
    """Questions and answers both fill their buffers: whoever asks must read while it waits to write."""
    backend, end, http = ends()
    before = set(threading.enumerate())

    async def ask() -> None:
        http.open()
        await asyncio.gather(*(http.submit([Ask(-1, list(range(400)))], print) for _ in range(2000)))
        http.leave()

    thread = threading.Thread(target=lambda: asyncio.run(asyncio.wait_for(ask(), 60)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert backend.taken == 2000
    assert end.join(10)
    assert backend.cancelled
    for left in set(threading.enumerate()) - before:
        left.join(10)
        assert not left.is_alive(), left


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_at_the_end_of_the_backend_leaves_nobody_waiting():
    backend, end, http = ends()

    async def ask() -> None:
        http.open()
        with pytest.raises(ApiError, match="its process is gone"):
            await http.look(metrics=True)
        with pytest.raises(ApiError, match="its process is gone"):
            await http.submit([Ask(-1, [1])], print)

    asyncio.run(ask())
    assert end.join(10)
    assert backend.cancelled
