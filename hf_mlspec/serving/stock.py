"""How does `transformers serve --continuous-batching` decode with a chain? Its manager of continuous batching is ours.

transformers' handlers read requests, and ask a manager for what the model writes. They find the manager's class by its
name in a module, where `enable` puts another one. Each request has its own settings and its own seed there.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig
from transformers.cli.serving import utils as stock
from transformers.cli.serving.utils import BaseGenerateManager, CBStreamer, CBWorkerDeadError

from ..engines.prefixes import bytes_of
from ..integration.config import SpeculationConfig
from ..integration.levels.resolve import check_words
from ..integration.stream.prompts import PREFILL_CHUNK, chunk_of
from ..speculation.sampling import drawn_seed
from .backend import Backend, Ticket
from .errors import ApiError
from .messages import Facts, News

_LOG = logging.getLogger("mlspec.serving")
_EVERY = 0.04  # seconds between two events of a stream, if rounds are shorter
_TO_END = 2.0  # seconds that decoding has to end, as transformers' own manager has
_STOCK = stock.CBGenerateManager
# Settings that handlers set for a request; with no others a request is prepared once for all that are alike.
_ASKED = {"max_new_tokens", "temperature", "top_p", "do_sample", "repetition_penalty", "sequence_bias", "stop_strings"}


@dataclass(frozen=True)
class Settings:
    """Of the stream: as of `generate_stream` and `Backend`."""

    levels: Sequence[Any] = ()
    slots: int = 8
    queue: int = 256
    config: SpeculationConfig | None = None
    how: dict[str, Any] = field(default_factory=dict)


def enable(levels: Sequence[Any] = (), *, slots: int = 8, queue: int = 256, prefill_chunk: int | None = PREFILL_CHUNK,
           prefix_cache: int | str | None = None, speculation_config: SpeculationConfig | dict | None = None) -> None:
    """From now on `transformers serve --continuous-batching` in this process decodes with these levels.

    levels: as `assistant_models` of `generate`. slots: requests decoded at a time. queue: requests that may wait for
    one; more are told 429. Others: as of `generate_stream`. ValueError or TypeError for what cannot be.
    """
    for name, value in (("slots", slots), ("queue", queue)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}, it must be a positive integer, a number of requests")
    if isinstance(levels, str) or not isinstance(levels, Sequence):
        raise TypeError(f"levels is {levels!r}, it must be a list of levels: write [{levels!r}]")
    check_words(list(levels))
    bytes_of(prefix_cache, "prefix_cache")
    chunk_of(prefill_chunk)
    how = {"prefill_chunk": prefill_chunk, "prefix_cache": prefix_cache}
    settings = Settings(list(levels), slots, queue, SpeculationConfig.of(speculation_config), how)
    stock.CBGenerateManager = partial(StreamsBehind, settings)


def disable() -> None:
    """Servers that start from now on decode with transformers' own manager."""
    stock.CBGenerateManager = _STOCK


class StreamsBehind(BaseGenerateManager):
    """One stream of requests over a chain, behind transformers' handlers. All methods are called in one event loop.

    It begins with the first request, as its tokenizer comes with that. cb_config: of a cache that is not here.
    """

    def __init__(self, settings: Settings, cb_config: Any = None) -> None:
        if cb_config is not None:
            _LOG.warning("--cb-* options are those of transformers' own manager, and change nothing here")
        self.settings, self.backend, self._loop = settings, None, None
        self._numbers, self._listeners = itertools.count(), {}

    def generate_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: GenerationConfig, request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue, CBStreamer]:  # fmt: skip
        """Texts come in the queue, None is the last one."""
        queue: asyncio.Queue = asyncio.Queue()
        written = SimpleNamespace(generated_tokens=[])

        def hear(news: News) -> None:
            written.generated_tokens += news.tokens
            try:
                streamer.put(written)
                if news.end is not None and news.end.error is not None:
                    queue.put_nowait(_failed(news.end.error))
                if news.end is not None:
                    streamer.end()
            except Exception as failure:  # of a parser of tool calls: the other requests go on
                ticket.cancel()
                queue.put_nowait(_failed(f"{type(failure).__name__}: {failure}"))

        ticket = self._ticket(model, processor, inputs, gen_config, _EVERY)
        cancels = SimpleNamespace(cancel_request=lambda _: ticket.cancel())
        streamer = CBStreamer(cancels, request_id, _tokenizer(processor)._tokenizer, self._loop, queue,
                              response_parser=response_parser)
        self._submit(ticket, hear)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Text, tokens of the prompt, new tokens."""
        ticket = self._ticket(model, processor, inputs, gen_config, None)
        found: asyncio.Future[News] = self._loop.create_future()

        def hear(news: News) -> None:
            if not found.done():
                found.set_result(news)

        self._submit(ticket, hear)
        try:
            news = await found
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        if news.end.refused:
            raise HTTPException(400, news.end.error)
        if news.end.error is not None:
            raise RuntimeError(news.end.error) if self.is_alive() else CBWorkerDeadError(news.end.error)
        return processor.decode(news.tokens, skip_special_tokens=True), len(inputs["input_ids"]), news.tokens

    def is_alive(self) -> bool:
        """Whether requests are decoded, or nobody has asked yet."""
        return self.backend is None or self.backend.alive

    def stop(self) -> None:
        """End what is decoded, with the tokens it has."""
        if self.backend is not None:
            self.backend.cancel()
            self.backend.join(_TO_END)

    def _ticket(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: GenerationConfig, every: float | None
    ) -> Ticket:
        """Its seed is drawn where the handler has just set torch's, as by generate alone."""
        if self.backend is None:
            self._begin(model, processor)
        left = Facts.of(model).positions - len(inputs["input_ids"])
        if 0 < left < (gen_config.max_new_tokens or 0):  # handlers ask for 1024 where a client asks for no number
            gen_config.max_new_tokens = left
        options = _options(gen_config, model.generation_config)
        samples = model.generation_config.do_sample if gen_config.do_sample is None else gen_config.do_sample
        seed = drawn_seed() if samples else None
        return Ticket(next(self._numbers), inputs["input_ids"], every, seed=seed, **options)

    def _begin(self, model: Any, processor: Any) -> None:
        of, self._loop = self.settings, asyncio.get_running_loop()
        backend = Backend(model, copy.deepcopy(_tokenizer(processor)), list(of.levels), of.config, slots=of.slots,
                          queue_limit=of.queue, watch=_Unwatched(), tell=self._tell, **of.how)
        try:
            backend.start()
        except Exception as error:  # of levels that do not fit the model: whoever asks is told, each time
            _LOG.error("the chain cannot begin", exc_info=error)
            raise HTTPException(503, f"the chain cannot begin: {error}") from error
        self.backend = backend

    def _submit(self, ticket: Ticket, listener: Callable[[News], None]) -> None:
        self._listeners[ticket.number] = listener
        try:
            self.backend.submit([ticket])
        except ApiError as error:
            del self._listeners[ticket.number]
            raise HTTPException(error.status, error.message) from error

    def _tell(self, news: list[News]) -> None:
        """From the thread that decodes."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._hear, news)

    def _hear(self, news: list[News]) -> None:
        for one in news:
            listener = self._listeners[one.number] if one.end is None else self._listeners.pop(one.number)
            listener(one)


class _Unwatched:
    """Counts nothing: transformers' server has no numbers to show."""

    level_failures = SimpleNamespace(inc=lambda: None)

    def began(self, ticket: Ticket) -> None: ...

    def wrote(self, levels: Any, passes: int) -> None: ...

    def ended(self, ticket: Ticket, now: float) -> None: ...


def _failed(error: str) -> Any:
    """What a stream ends with; handlers put it between quotes."""
    return stock._StreamError(json.dumps(error)[1:-1])


def _tokenizer(processor: Any) -> Any:
    """A processor's, or itself."""
    return getattr(processor, "tokenizer", processor)


def _options(asked: GenerationConfig, own: GenerationConfig) -> dict[str, Any]:
    """Arguments of generate for what a handler asks for. own: the model's settings."""
    settings = copy.deepcopy(asked)
    settings.use_cache = own.use_cache  # transformers' own manager has a cache of its own, and switches this one off
    given, wanted = own.to_dict(), settings.to_dict()
    changed = {name: getattr(settings, name) for name, value in wanted.items() if value != given.get(name)}
    if changed.keys() <= _ASKED and None not in changed.values():
        return {**changed, "max_new_tokens": settings.max_new_tokens}
    return {"generation_config": settings}
