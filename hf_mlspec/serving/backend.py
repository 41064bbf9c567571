"""Who decodes what clients ask for? One thread, which runs a stream of requests over a chain.

HTTP is somewhere else: tickets come from any thread, and what becomes of them is told to their listeners.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..integration.config import SpeculationConfig
from ..integration.stream.events import NewTokens
from ..integration.stream.request import Completion, Request
from ..integration.stream.stream import generate_stream
from .errors import ApiError, busy, ending

Listener = Callable[["Ticket", NewTokens | Completion], None]


class Ticket(Request):
    """A request of the stream, and who hears of it.

    listener: called in the thread that decodes, with the tokens of each round and then the completion; it must not
        wait. arrived, began: seconds of time.perf_counter, when it was submitted and when its first tokens came.
    """

    def __init__(self, input_ids: list[int], listener: Listener, **options: Any) -> None:
        super().__init__(input_ids, **options)
        self.listener, self.arrived, self.began = listener, time.perf_counter(), None
        self.told = 0  # tokens the listener knows


class Backend:
    """A chain that decodes tickets as slots become free.

    model, tokenizer: the target and a tokenizer that nobody else uses. levels, config: of the chain. slots: rows
    decoded at a time. queue_limit: tickets that may wait for a slot. watch: hears of every event too (see `Watch`).
    """

    def __init__(self, model: Any, tokenizer: Any, levels: list[Any], config: SpeculationConfig | None = None, *,
                 slots: int = 8, queue_limit: int = 256, watch: Any = None) -> None:
        self.model, self.tokenizer, self.levels, self.config = model, tokenizer, list(levels), config
        self.slots, self.queue_limit, self.watch = slots, queue_limit, watch
        self.error: Exception | None = None  # what ended the thread
        self._waiting: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._live: dict[int, Ticket] = {}  # tickets that the stream has, by their id()
        self._thread = threading.Thread(target=self._run, name="mlspec-decoding", daemon=True)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Tickets without a slot."""
        return self._waiting.qsize()

    @property
    def running(self) -> int:
        """Tickets that have a slot."""
        return len(self._live)

    @property
    def alive(self) -> bool:
        """Whether tickets are decoded."""
        return self._thread.is_alive() and self.error is None

    def submit(self, tickets: list[Ticket]) -> None:
        """All of them, or none: ApiError where they cannot be taken."""
        with self._lock:
            if self._closed:
                raise ending()
            if not self.alive:
                raise ApiError(503, f"decoding has ended: {self.error}", kind="server_error", code="not_decoding")
            if self.waiting + len(tickets) > self.queue_limit:
                raise busy(f"{self.waiting} answers wait already, at most {self.queue_limit} may; ask again later")
            for ticket in tickets:
                self._waiting.put(ticket)

    def close(self) -> None:
        """Take no more tickets; those that are here are decoded."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        events = generate_stream(self.model, self._arriving(), max_batch=self.slots, tokenizer=self.tokenizer,
                                 assistant_models=self.levels, speculation_config=self.config, events=True)
        for event in events:
            self._tell(event)

    def _arriving(self) -> Iterator[Ticket | None]:
        """Tickets for the stream; where none is decoded there is nothing to do but wait for one."""
        while True:
            try:
                ticket = self._waiting.get(block=not self._live)
            except queue.Empty:
                yield None
                continue
            if ticket is None:
                return
            self._live[id(ticket)] = ticket
            yield ticket

    def _tell(self, event: NewTokens | Completion) -> None:
        ticket = event.request
        if isinstance(event, Completion):
            self._live.pop(id(ticket), None)
        elif ticket.began is None:
            ticket.began = time.perf_counter()
        if self.watch is not None:
            self.watch.saw(ticket, event)
        ticket.listener(ticket, event)
