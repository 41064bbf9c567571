"""Who decodes what clients ask for? One thread, which runs a stream of requests over a chain.

HTTP is somewhere else: tickets come from any thread, and what becomes of them is told to their listeners.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..integration.call import last_stats
from ..integration.config import SpeculationConfig
from ..integration.stream.events import NewTokens
from ..integration.stream.request import Completion, Request
from ..integration.stream.stream import generate_stream
from .errors import ApiError, busy, ending

Listener = Callable[["Ticket", NewTokens | Completion], None]
_LOG = logging.getLogger("mlspec.serving")


class Ticket(Request):
    """A request of the stream, and who hears of it.

    listener: called in the thread that decodes, with the tokens of each round and then the completion; it must not
        wait. arrived, began: seconds of time.perf_counter, when it was submitted and when its first tokens came.
    told, first_tokens: tokens that the listener knows, and those of them that came first. said: characters of text.
    """

    def __init__(self, input_ids: list[int], listener: Listener, **options: Any) -> None:
        super().__init__(input_ids, **options)
        self.listener, self.arrived, self.began = listener, time.perf_counter(), None
        self.told = self.first_tokens = self.said = 0
        self.again = [0, 0]  # of those the tokens and characters that a second stream made once more

    def news(self, event: NewTokens) -> NewTokens | None:
        """What of an event the listener does not know; a stream that begins again makes the same tokens again."""
        tokens, text = len(event.tokens), event.text or ""
        old, old_text = min(self.told - self.again[0], tokens), min(self.said - self.again[1], len(text))
        self.again = [self.again[0] + tokens, self.again[1] + len(text)]
        if old == tokens and old_text == len(text):
            return None
        self.told, self.said = self.told + tokens - old, self.said + len(text) - old_text
        if self.began is None:
            self.began, self.first_tokens = time.perf_counter(), self.told
        return NewTokens(event.request, event.tokens[old:], text[old_text:], event.levels[old:], event.logprobs[old:])


class Backend:
    """A chain that decodes tickets as slots become free.

    model, tokenizer: the target and a tokenizer that nobody else uses. levels, config: of the chain. slots: rows
    decoded at a time. queue_limit: tickets that may wait for a slot. watch: counts every event. how: other arguments
    of `generate_stream`.

    A level that fails is left out, and so are those beside it: the stream goes on with the target alone. Where the
    stream ends, as with captured rounds, answers that run begin again with the target alone, which writes the same
    tokens, and clients see none of it. Where the target itself fails the running answers end with the error and a new
    stream begins, unless nothing was decoded in between.
    """

    def __init__(self, model: Any, tokenizer: Any, levels: list[Any], config: SpeculationConfig | None = None, *,
                 slots: int = 8, queue_limit: int = 256, watch: Any, **how: Any) -> None:
        self.how = how
        self.model, self.tokenizer, self.levels, self.config = model, tokenizer, list(levels), config
        self.slots, self.queue_limit, self.watch = slots, queue_limit, watch
        self.error: Exception | None = None  # what ended the thread
        self.levels_error: Exception | None = None  # why levels were left out
        self._waiting: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = self._cancelled = False
        self._live: dict[int, Ticket] = {}  # tickets that the stream has, by their id()
        self._ready = threading.Event()
        self._decoded = False  # whether the stream that runs has decoded anything
        self._thread = threading.Thread(target=self._run, name="mlspec-decoding", daemon=True)

    def start(self) -> None:
        """Begin to decode; back when the levels are loaded. Raises what is wrong with them."""
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            raise self.error

    @property
    def waiting(self) -> int:
        """Tickets without a slot."""
        return max(self._waiting.qsize() - self._closed, 0)

    @property
    def running(self) -> int:
        """Tickets that have a slot."""
        return len(self._live)

    @property
    def alive(self) -> bool:
        """Whether tickets are decoded."""
        return self._thread.is_alive() and self.error is None

    def require_room(self, count: int) -> None:
        """ApiError where so many tickets cannot be taken now."""
        if self._closed:
            raise ending()
        if not self.alive:
            raise ApiError(503, f"decoding has ended: {self.error}", kind="server_error", code="not_decoding")
        if self.waiting + count > self.queue_limit:
            raise busy(f"{self.waiting} answers wait already, at most {self.queue_limit} may; ask again later")

    def submit(self, tickets: list[Ticket]) -> None:
        """All of them, or none: ApiError where they cannot be taken."""
        with self._lock:
            self.require_room(len(tickets))
            for ticket in tickets:
                self._waiting.put(ticket)

    def close(self) -> None:
        """Take no more tickets; those that are here are decoded."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)

    def cancel(self) -> None:
        """Take no more tickets, and end those that are here with the tokens they have."""
        self.close()
        self._cancelled = True
        for ticket in list(self._live.values()):
            ticket.cancel()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; whether it came."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """One stream, and another one for as long as streams fail and there is hope."""
        levels: list[Any] | None = self.levels
        again: list[Ticket] = []
        while levels is not None:
            try:
                self._decode(levels, again)
                return
            except Exception as error:  # whatever a model raises, somebody waits for an answer
                levels, again = self._after(error, levels)

    def _decode(self, levels: list[Any], again: list[Ticket]) -> None:
        self._decoded = False
        events = generate_stream(self.model, self._arriving(again), max_batch=self.slots, tokenizer=self.tokenizer,
                                 assistant_models=levels, speculation_config=self.config, events=True, **self.how)
        self._ready.set()
        for event in events:
            self._note_levels()
            self._tell(event)

    def _note_levels(self) -> None:
        """What the stream says of levels that it left out."""
        stats = last_stats(self.model)
        if stats is not None and stats.levels_error and self.levels_error is None:
            self.levels_error = RuntimeError(stats.levels_error)
            self.watch.level_failures.inc()

    def _after(self, error: Exception, levels: list[Any]) -> tuple[list[Any] | None, list[Ticket]]:
        """With which levels, None for not at all, and with which tickets the next stream begins."""
        if not self._ready.is_set():  # nobody was served yet, and whoever started hears of it
            self.error = error
            self._ready.set()
            return None, []
        _LOG.error("decoding failed%s", ", the target goes on alone" if levels else "", exc_info=error)
        if levels:
            self.levels_error = error
            self.watch.level_failures.inc()
            again = list(self._live.values())
            for ticket in again:
                ticket.again = [0, 0]
            return [], again
        self._end_with(error)
        if self._decoded:
            return [], []
        self._give_up(error)
        return None, []

    def _arriving(self, again: list[Ticket]) -> Iterator[Ticket | None]:
        """Tickets for the stream; where none is decoded there is nothing to do but wait for one."""
        yield from again
        while True:
            try:
                ticket = self._waiting.get(block=not self._live)
            except queue.Empty:
                yield None
                continue
            if ticket is None:
                self._waiting.put(None)  # for the stream that begins where this one fails
                return
            self._live[id(ticket)] = ticket
            if self._cancelled:
                ticket.cancel()
            yield ticket

    def _tell(self, event: NewTokens | Completion) -> None:
        ticket = event.request
        if isinstance(event, Completion):
            self._live.pop(id(ticket), None)
            self._decoded = self._decoded or event.error is None
        elif (event := ticket.news(event)) is None:
            return
        self.watch.saw(ticket, event)
        ticket.listener(ticket, event)

    def _end_with(self, error: Exception) -> None:
        """Everything that has a slot ends."""
        for ticket in list(self._live.values()):
            failed = RuntimeError(f"{type(error).__name__}: {error}")
            self._tell(Completion(ticket, [], [], "error", failed))

    def _give_up(self, error: Exception) -> None:
        """Nothing can be decoded: what waits ends, and nothing more is taken."""
        with self._lock:
            self.error = error
        while not self._waiting.empty():
            if (ticket := self._waiting.get()) is not None:
                self._live[id(ticket)] = ticket
        self._end_with(error)
