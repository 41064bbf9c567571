"""Who decodes what clients ask for? One thread, which runs a stream of requests over a chain.

HTTP is somewhere else: tickets come from any thread, and what becomes of them is told to their listeners.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..integration.call import last_stats
from ..integration.config import SpeculationConfig
from ..integration.stream.events import NewTokens, TokenLogprob
from ..integration.stream.request import Completion, Request
from ..integration.stream.stream import stream_in_rounds
from .errors import ApiError, busy, ending

_LOG = logging.getLogger("mlspec.serving")
_UNCOUNTED = 1.0  # seconds of rounds, at most, that `watch` does not know of


@dataclass
class News:
    """What a ticket gained since its listener heard of it last: of each token its id, the level that drafted it and,
    where asked for, its log probability. end: its completion, if it has ended."""

    tokens: list[int] = field(default_factory=list)
    levels: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Completion | None = None


Listener = Callable[[News], None]


class Ticket(Request):
    """A request of the stream, and who hears of it.

    listener: called in `loop`, the event loop of whoever asked, with what the ticket gained. every: seconds between
        two calls, if rounds are shorter; 0: it hears of every round; None: of the end only, with all that was gained.
        The first tokens, of a ticket that does not wait for the end, and the end are told at once.
    arrived, began, heard: seconds of time.perf_counter, when it was submitted, when its first tokens came, and when
        its listener was called last. tokens, first_tokens: how many it has, and how many came first.
    """

    def __init__(self, input_ids: list[int], loop: AbstractEventLoop, listener: Listener, every: float | None = 0.0,
                 **options: Any) -> None:
        super().__init__(input_ids, **options)
        self.loop, self.listener, self.every = loop, listener, every
        self.arrived, self.began, self.heard = time.perf_counter(), 0.0, 0.0
        self.tokens = self.first_tokens = 0
        self.news = News()

    def take(self) -> News:
        """What its listener has not heard of."""
        news, self.news = self.news, News()
        return news


class Backend:
    """A chain that decodes tickets as slots become free.

    model, tokenizer: the target and a tokenizer that nobody else uses. levels, config: of the chain. slots: rows
    decoded at a time. queue_limit: tickets that may wait for a slot. watch: counts every event. how: other arguments
    of `stream_in_rounds`.

    A level that fails is left out, and so are those beside it: the stream goes on with the target alone, and so do
    streams after it. Where the target itself fails the running answers end with the error and a new stream begins,
    unless nothing was decoded in between.

    Listeners hear of all tickets of an event loop in one call into it: rounds can be as short as such a call.
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
        self._untold: dict[int, Ticket] = {}  # tickets with news that need not wait for the end, by their id()
        self._round = 0.0  # when the last round ended
        self._levels: Counter[str | None] = Counter()  # of tokens that `watch` does not know of; and passes of the
        self._passes = 0  # target, one for each row of each
        self._counted = 0.0  # when `watch` was told of them last
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
        going = True
        while going:
            try:
                self._decode()
                return
            except Exception as error:  # whatever a model raises, somebody waits for an answer
                going = self._after(error)

    def _decode(self) -> None:
        self._decoded = False
        levels = self.levels if self.levels_error is None else []
        rounds = stream_in_rounds(self.model, self._arriving(), max_batch=self.slots, tokenizer=self.tokenizer,
                                  assistant_models=levels, speculation_config=self.config, **self.how)
        self._ready.set()
        for told in rounds:
            self._note_levels()
            self._tell(told)

    def _note_levels(self) -> None:
        """What the stream says of levels that it left out."""
        stats = last_stats(self.model)
        if stats is not None and stats.levels_error and self.levels_error is None:
            self.levels_error = RuntimeError(stats.levels_error)
            self.watch.level_failures.inc()

    def _after(self, error: Exception) -> bool:
        """Whether another stream begins behind one that failed. Levels that fail it would have left out: it is the
        target's failure, or the machine's."""
        if not self._ready.is_set():  # nobody was served yet, and whoever started hears of it
            self.error = error
            self._ready.set()
            return False
        self._note_levels()
        _LOG.error("decoding failed", exc_info=error)
        self._end_with(error)
        if self._decoded:
            return True
        self._give_up(error)
        return False

    def _arriving(self) -> Iterator[Ticket | None]:
        """Tickets for the stream; where none is decoded there is nothing to do but wait for one."""
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

    def _tell(self, told: list[NewTokens | Completion]) -> None:
        """What a round brought. Listeners hear of it who have waited for long, or would if they waited for another
        round."""
        now = time.perf_counter()
        next_round, self._round = 2 * now - self._round, now
        due = {id(event.request): event.request for event in told if self._gained(event, now)}
        due |= {key: one for key, one in self._untold.items() if next_round - one.heard >= one.every}
        if due or now - self._counted >= _UNCOUNTED:
            self._count(now)
        if due:
            self._hand_over(list(due.values()), now)

    def _gained(self, event: NewTokens | Completion, now: float) -> bool:
        """Note an event of a ticket; whether it cannot wait."""
        ticket = event.request
        if isinstance(event, Completion):
            self._decoded = self._decoded or event.error is None
            ticket.news.end = event
            self.watch.ended(ticket, now)
            return True
        news, is_first = ticket.news, not ticket.tokens
        news.tokens += event.tokens
        news.levels += event.levels
        news.logprobs += event.logprobs
        ticket.tokens += len(event.tokens)
        self._levels.update(event.levels)
        self._passes += 1
        if is_first:
            ticket.began, ticket.first_tokens = now, ticket.tokens
            self.watch.began(ticket)
        if ticket.every is None:
            return False
        self._untold[id(ticket)] = ticket
        return is_first

    def _count(self, now: float) -> None:
        """Let `watch` know what was written since it heard of it last."""
        self.watch.wrote(self._levels, self._passes)
        self._levels, self._passes, self._counted = Counter(), 0, now

    def _hand_over(self, tickets: list[Ticket], now: float) -> None:
        """Let the listeners of tickets hear their news, each in its event loop."""
        loops: dict[AbstractEventLoop, list[tuple[Listener, News]]] = {}
        for ticket in tickets:
            self._untold.pop(id(ticket), None)
            ticket.heard = now
            if ticket.news.end is not None:
                self._live.pop(id(ticket), None)
            loops.setdefault(ticket.loop, []).append((ticket.listener, ticket.take()))
        for loop, heard in loops.items():
            if not loop.is_closed():  # of a loop that has ended nobody listens
                loop.call_soon_threadsafe(_listen, heard)

    def _end_with(self, error: Exception) -> None:
        """Everything that has a slot ends."""
        failed = RuntimeError(f"{type(error).__name__}: {error}")
        self._tell([Completion(ticket, [], [], "error", failed) for ticket in self._live.values()])

    def _give_up(self, error: Exception) -> None:
        """Nothing can be decoded: what waits ends, and nothing more is taken."""
        with self._lock:
            self.error = error
        while not self._waiting.empty():
            if (ticket := self._waiting.get()) is not None:
                self._live[id(ticket)] = ticket
        self._end_with(error)


def _listen(heard: list[tuple[Listener, News]]) -> None:
    for listener, news in heard:
        listener(news)
