"""What does the event loop that speaks HTTP know of the backend? Its end of the connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from .errors import ApiError
from .messages import Ask, Cancel, Close, Ended, Look, News, Ready, Replied, State, Submit, Told

Listener = Callable[[News], None]
_PATIENCE = 5.0  # seconds for the backend to say how it is


class HttpEnd:
    """Asks a backend in another process, and lets listeners hear what it tells. All of it in one event loop.

    A thread of its own writes: an event loop that waits for the other end to read reads nothing itself, and where the
    other end waits for that, too, both wait for ever.

    on_end: called when the other end is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection, self.gone = connection, False
        self._unsent: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self.on_end: Callable[[], None] | None = None
        self._numbers = itertools.count()
        self._listeners: dict[int, Listener] = {}  # of requests that have not ended
        self._replies: dict[int, asyncio.Future] = {}

    def open(self) -> None:
        """Read what is told, in the event loop that runs."""
        handle = self.connection.fileno()
        asyncio.get_running_loop().add_reader(handle, self._read)
        os.set_blocking(handle, True)  # uvloop lets it be none; messages are read and written whole
        threading.Thread(target=self._write, name="mlspec-asking", daemon=True).start()

    def leave(self) -> None:
        """Ask and hear nothing any more; the other end hears that this one is gone."""
        if not self.gone:
            with socket.socket(fileno=os.dup(self.connection.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)  # whoever waits in it, at either end, waits no longer
            self._ended()

    async def submit(self, asks: list[Ask], listener: Listener) -> None:
        """All of them, or none: ApiError where they cannot be taken. Their numbers are set; the listener hears of
        all."""
        for ask in asks:
            ask.number = next(self._numbers)
            self._listeners[ask.number] = listener
        try:
            await self._ask(Submit(next(self._numbers), asks))
        except BaseException:
            self.cancel([ask.number for ask in asks])
            raise

    def cancel(self, numbers: list[int]) -> None:
        """Nobody waits for these any more."""
        left = [number for number in numbers if self._listeners.pop(number, None) is not None]
        if left:
            self._send(Cancel(left))

    async def look(self, metrics: bool = False) -> State:
        """How the backend is; ApiError where it does not say so."""
        try:
            return await asyncio.wait_for(self._ask(Look(next(self._numbers), metrics)), _PATIENCE)
        except (TimeoutError, asyncio.TimeoutError):
            raise _silent(f"nothing heard of it for {_PATIENCE:.0f} seconds") from None

    def ready(self) -> None:
        """HTTP is answered from now on."""
        self._send(Ready())

    def close(self) -> None:
        """Take no more requests."""
        self._send(Close())

    def cancel_all(self) -> None:
        """And end those that are there."""
        self._send(Close(cancel=True))

    async def _ask(self, message: Submit | Look) -> Any:
        if self.gone:
            raise _silent("its process is gone")
        reply = self._replies[message.number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            answer = await reply
        finally:
            self._replies.pop(message.number, None)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def _send(self, message: Any) -> None:
        self._unsent.put(ForkingPickler.dumps(message))  # what cannot be pickled is its sender's error

    def _write(self) -> None:
        """Send what is to be sent, in a thread, until `_ended`. Where the connection breaks, `_read` hears of it."""
        with self.connection, contextlib.suppress(OSError):
            while (message := self._unsent.get()) is not None:
                self.connection.send_bytes(message)

    def _read(self) -> None:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self._ended()
            return
        if isinstance(message, Told):
            for news in message.news:
                self._hear(news)
        elif isinstance(message, Replied):
            reply = self._replies.get(message.number)
            if reply is not None and not reply.done():
                reply.set_result(message.answer)

    def _hear(self, news: News) -> None:
        ended = news.end is not None
        listener = self._listeners.pop(news.number, None) if ended else self._listeners.get(news.number)
        if listener is not None:  # else nobody waits for it
            listener(news)

    def _ended(self) -> None:
        """Everybody who waits is told."""
        self.gone = True
        asyncio.get_running_loop().remove_reader(self.connection.fileno())
        self._unsent.put(None)
        error = _silent("its process is gone")
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result(error)
        for number in list(self._listeners):
            self._hear(News(number, end=Ended("error", error.message)))
        if self.on_end is not None:
            self.on_end()


def _silent(why: str) -> ApiError:
    return ApiError(503, f"decoding has ended: {why}", kind="server_error", code="not_decoding")
