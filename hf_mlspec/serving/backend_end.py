"""How does a backend hear what HTTP asks for, and how does it answer? At its end of a connection."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Connection
from typing import Any

from .backend import Backend, Ticket
from .errors import ApiError
from .messages import Cancel, Close, Look, News, Ready, Replied, Submit, Told


class BackendEnd:
    """Takes tickets from a connection, and tells of them on it.

    ready: set when HTTP is answered, or when the other end is gone. gone: whether it is. What is told blocks while the
    other end does not read: so it can never be far behind. The other end always reads, whatever its clients do.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection, self.ready, self.gone = connection, threading.Event(), False
        self._sending = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._thread: threading.Thread | None = None

    def serve(self, backend: Backend, watch: Any) -> None:
        """Take tickets for a backend, in a thread, until the connection ends; then nobody waits for it any more."""
        self._thread = threading.Thread(target=self._run, args=(backend, watch), name="mlspec-taking", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait until the other end is gone; whether it is."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.gone

    def tell(self, news: list[News]) -> None:
        """What tickets gained."""
        for one in news:
            if one.end is not None:
                self._tickets.pop(one.number, None)
        self.send(Told(news))

    def send(self, message: Any) -> None:
        """To the other end, if there is one."""
        with self._sending, contextlib.suppress(OSError):  # where it is gone the thread that listens hears of it
            self.connection.send(message)

    def _run(self, backend: Backend, watch: Any) -> None:
        """However it ends, nobody waits for this end, and this one for nobody."""
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._take(self.connection.recv(), backend, watch)
        finally:
            self.gone = True
            backend.cancel()
            self.ready.set()
            with self._sending:
                self.connection.close()

    def _take(self, message: Any, backend: Backend, watch: Any) -> None:
        match message:
            case Submit(number, asks):
                self.send(Replied(number, self._submitted(asks, backend)))
            case Cancel(numbers):
                for number in numbers:
                    if (ticket := self._tickets.get(number)) is not None:
                        ticket.cancel()
            case Look(number, metrics):
                state = backend.state
                state.metrics = watch.text() if metrics else b""
                self.send(Replied(number, state))
            case Close(cancel):
                (backend.cancel if cancel else backend.close)()
            case Ready():
                self.ready.set()

    def _submitted(self, asks: list[Any], backend: Backend) -> ApiError | None:
        """None where the backend takes them, else why it does not."""
        tickets = [Ticket(ask.number, ask.input_ids, ask.every, ask.levels, seed=ask.seed, logprobs=ask.logprobs,
                          **ask.options) for ask in asks]
        self._tickets |= {ticket.number: ticket for ticket in tickets}
        try:
            backend.submit(tickets)
        except ApiError as error:
            for ticket in tickets:
                del self._tickets[ticket.number]
            return error
        return None
