"""Who answers the lines of a batch? A chain of its own, which decodes them side by side as the server would."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ..evaluation.harness_system import chain_identity
from ..integration.config import SpeculationConfig
from ..integration.hook import enable
from ..integration.levels.load import hide_progress_bars, load_causal_lm
from ..integration.levels.resolve import nested_for
from ..serving.backend import Backend
from ..serving.backend_end import BackendEnd
from ..serving.completions import Completions
from ..serving.endpoint import Endpoint
from ..serving.errors import ApiError, failed
from ..serving.http_end import HttpEnd
from ..serving.limits import Limits
from ..serving.messages import Facts, Setup
from .lines import COMPLETION, BadLine, Line, answered, read_line, unanswered
from .source import Numbered

_NO_LIMIT = 2**31 - 1
_MOST_CHOICES = 128  # answers to one line, as in OpenAI's API
_NOT_DECODING, _FAILED = 503, 500
PREFILL_CHUNK = 512  # tokens of a prompt read between two rounds


@dataclass(frozen=True)
class Settings:
    """What a worker decodes with. name: what requests may call the model. slots: answers decoded at a time.
    new_tokens: of an answer at most, and of one that asks for no number. chat_template: a Jinja template in place of
    the tokenizer's own. seed: of the job. processes: that share the model, on one machine."""

    model: str
    dtype: str
    device: str
    levels: list[str]
    name: str
    slots: int = 8
    new_tokens: int = 1024
    chat_template: str | None = None
    seed: int = 0
    processes: int = 1
    config: SpeculationConfig = field(default_factory=SpeculationConfig)


class WorkerLost(Exception):
    """A worker ended, or cannot decode any more; its lines are to be answered by another one."""


class Worker:
    """Answers lines, of any number of calls side by side, with the model of its settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._backend: Backend | None = None
        self._asking: HttpEnd | None = None  # in the event loop of the first call
        self._endpoints: dict[str, Endpoint] = {}

    def load(self) -> dict[str, Any]:
        """Load the model and its levels; -> what its answers depend on. ValueError for what cannot be loaded."""
        asked = self.settings
        enable()
        hide_progress_bars()
        model, tokenizer = self._read_model()
        model = nested_for(model, asked.levels)
        if asked.chat_template is not None:
            tokenizer.chat_template = asked.chat_template
        identity = chain_identity(model, tokenizer, asked.levels)
        limits = Limits(new_tokens=asked.new_tokens, queue=_NO_LIMIT, choices=_MOST_CHOICES, seconds=_NO_LIMIT)
        self._setup = Setup(Facts.of(model), tokenizer, asked.name, [], limits, every=0.0, grace=0.0)
        self._reading, self._writing = ThreadPoolExecutor(1, "mlspec-reading"), copy.deepcopy(tokenizer)
        own, self._other = Pipe()
        end = BackendEnd(own)
        self._backend = self._make_backend(
            model, copy.deepcopy(tokenizer), asked.levels, asked.config, slots=asked.slots, queue_limit=_NO_LIMIT,
            watch=_Unwatched(), tell=end.tell, prefill_chunk=PREFILL_CHUNK, prefix_cache=None,
        )  # fmt: skip
        self._backend.start()
        end.serve(self._backend, _Unwatched())
        return identity

    def _read_model(self) -> tuple[Any, Any]:
        return load_causal_lm(self.settings.model, self.settings.dtype, self.settings.device)

    def _make_backend(self, *words: Any, **named: Any) -> Backend:
        return Backend(*words, **named)

    def _at(self, url: str) -> Endpoint:
        """What answers there. ValueError for chats where the packages are missing that read them."""
        if self._asking is None:
            self._asking = HttpEnd(self._other)
            self._asking.open()
        if url not in self._endpoints:
            style = _style(url)(self._setup.facts, self._setup.tokenizer, self._writing)
            self._endpoints[url] = Endpoint(style, self._asking, self._setup, self._reading)
        return self._endpoints[url]

    async def answer(self, lines: list[Numbered]) -> tuple[list[dict[str, Any]], list[str]]:
        """The lines of the answers, in order, and the fields that no request has. WorkerLost where nothing can be
        decoded any more."""
        read = [self._read(*line) for line in lines]
        found = await asyncio.gather(*(self._answered(one) for one in read if isinstance(one, Line)))
        answers = iter(found)
        told = [next(answers) if isinstance(one, Line) else one for one in read]
        return told, sorted({name for one in read if isinstance(one, Line) for name in one.unread})

    def close(self) -> None:
        """Decode no more; threads and connection end, in the event loop of the calls."""
        if self._backend is None:
            return
        self._backend.cancel()
        self._backend.join(5.0)
        self._reading.shutdown(wait=False)
        if self._asking is None:
            self._other.close()
        else:
            self._asking.leave()

    def _read(self, number: int, text: bytes) -> Line | dict[str, Any]:
        try:
            return read_line(number, text, self.settings.seed)
        except BadLine as error:
            return unanswered(number, error)

    async def _answered(self, line: Line) -> dict[str, Any]:
        """An answer that failed while others were decoded beside it is asked for once more. What nobody foresaw is
        said of its line alone, as a server would: the others have answers."""
        endpoint = self._at(line.url)
        for last in (False, True):
            try:
                # created is 0: the same file, whenever it is written.
                reply = await endpoint.answer(dict(line.body), name=line.name, created=0)
                return answered(line, 200, await reply.whole())
            except ApiError as error:
                if error.status == _NOT_DECODING:
                    raise WorkerLost(error.message) from error
                if error.status != _FAILED or last:
                    return answered(line, error.status, error.body())
            except Exception as error:
                return answered(line, _FAILED, failed(f"{type(error).__name__}: {error}").body())
        raise AssertionError("the last attempt has an answer")


def _style(url: str) -> Any:
    """Chats are not imported before: transformers' own server, whose parts read them, wants packages of its own."""
    if url == COMPLETION:
        return Completions
    try:
        from ..serving.chat import Chat
    except (ImportError, NameError) as error:  # NameError: transformers defines less without them
        raise ValueError("a line is a chat, and what reads chats is not installed: pip install 'hf-mlspec[serve]', "
                         "or write prompts") from error
    return Chat


class _Unwatched:
    """Counts nothing: what a server tells Prometheus."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any) -> None:
        return None


def asked_of(settings: Settings, sha256: str, lines_per_file: int) -> dict[str, Any]:
    """What the files of a job depend on, as JSON: no paths of the machine, but for the names of models."""
    config = {name: value for name, value in vars(settings.config).items() if value is not None}
    shared = {} if settings.processes == 1 else {"processes": settings.processes}  # who add up in their own order
    return shared | {
        "input": sha256, "lines_per_file": lines_per_file, "model": Path(settings.model).name, "dtype": settings.dtype,
        "levels": [Path(level).name for level in settings.levels], "name": settings.name, "seed": settings.seed,
        "new_tokens": settings.new_tokens, "chat_template": settings.chat_template, "speculation": config,
    }  # fmt: skip
