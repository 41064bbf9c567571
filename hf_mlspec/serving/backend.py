"""Who decodes what clients ask for? One thread, which runs a stream of requests over a chain.

HTTP is somewhere else, in a process of its own: tickets come from any thread, and what becomes of all of them is told
in one call.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..integration.call import last_stats
from ..integration.config import SpeculationConfig
from ..integration.stream.events import NewTokens
from ..integration.stream.request import Completion, Request
from ..integration.stream.stream import stream_in_rounds
from .errors import ApiError, busy, ending
from .messages import Ended, News, State

_LOG = logging.getLogger("mlspec.serving")
_UNCOUNTED = 1.0  # seconds of rounds, at most, that `watch` does not know of


class Ticket(Request):
    """A request of the stream that somebody waits for.

    number: its name. every: seconds between two times that its news are told, if rounds are shorter; 0: every round's
        are; None: only with its end, all at once. Its first tokens, if it does not wait for the end, and its end are
        told at once. levels: whether its news have the levels that drafted its tokens.
    arrived, began, heard: seconds of time.perf_counter, when it was submitted, when its first tokens came, and when
        its news were told last. tokens, first_tokens: how many it has, and how many came first.
    """

    def __init__(self, number: int, input_ids: list[int], every: float | None = 0.0, levels: bool = False,
                 **options: Any) -> None:
        super().__init__(input_ids, id=number, **options)
        self.number, self.every, self.levels = number, every, levels
        self.arrived, self.began, self.heard = time.perf_counter(), 0.0, 0.0
        self.tokens = self.first_tokens = 0
        self.news = News(number)

    def take(self) -> News:
        """What was not told yet."""
        news, self.news = self.news, News(self.number)
        return news


class Backend:
    """A chain that decodes tickets as slots become free.

    model, tokenizer: the target and a tokenizer that nobody else uses. levels, config: of the chain. slots: rows
    decoded at a time. queue_limit: tickets that may wait for a slot. watch: counts every event. tell: called with what
    tickets gained, of all of them in one call: rounds can be as short as such a call. how: other arguments of
    `stream_in_rounds`.

    A level that fails is left out, and so are those beside it: the stream goes on with the target alone, and so do
    streams after it. Where the target itself fails the running answers end with the error and a new stream begins,
    unless nothing was decoded in between.
    """

    def __init__(self, model: Any, tokenizer: Any, levels: list[Any], config: SpeculationConfig | None = None, *,
                 slots: int = 8, queue_limit: int = 256, watch: Any, tell: Callable[[list[News]], None],
                 **how: Any) -> None:
        self.how, self.tell = how, tell
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

    @property
    def state(self) -> State:
        """How it is, without its numbers."""
        error = None if self.alive else str(self.error or "the server is shutting down")
        levels = None if self.levels_error is None else str(self.levels_error)
        return State(error, levels, self.running, self.waiting)

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
        """What a round brought. It is told of tickets that have waited for long, or would if they waited for another
        round, and of all others that are told as often: whoever reads it wakes once for all of them."""
        now = time.perf_counter()
        next_round, self._round = 2 * now - self._round, now
        due = {id(event.request): event.request for event in told if self._gained(event, now)}
        others = {key: one for key, one in self._untold.items() if key not in due}
        late = {one.every for one in others.values() if next_round - one.heard >= one.every}
        due |= {key: one for key, one in others.items() if one.every in late}
        if due or now - self._counted >= _UNCOUNTED:
            self._count(now)
        if due:
            self._hand_over(due.values(), now)

    def _gained(self, event: NewTokens | Completion, now: float) -> bool:
        """Note an event of a ticket; whether it cannot wait."""
        ticket = event.request
        if isinstance(event, Completion):
            self._decoded = self._decoded or event.error is None
            ticket.news.end = _ended(event)
            self.watch.ended(ticket, now)
            return True
        news, is_first = ticket.news, not ticket.tokens
        news.tokens += event.tokens
        if ticket.levels:
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

    def _hand_over(self, tickets: Iterable[Ticket], now: float) -> None:
        """Tell the news of tickets."""
        told = []
        for ticket in tickets:
            self._untold.pop(id(ticket), None)
            ticket.heard = now
            if ticket.news.end is not None:
                self._live.pop(id(ticket), None)
            told.append(ticket.take())
        self.tell(told)

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


def _ended(end: Completion) -> Ended:
    """The end of a ticket, as it is told."""
    refused = end.speculation is None and isinstance(end.error, ValueError | TypeError)
    return Ended(end.finish_reason, None if end.error is None else str(end.error), refused)
