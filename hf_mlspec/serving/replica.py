"""How does one of several servers answer a request that another process read? By the application of `mlspec serve`.

There is no socket: a request comes as its parts, and the answer goes as what an ASGI application sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from multiprocessing import Pipe
from typing import Any

from ..engines.prefixes import bytes_of
from ..integration.config import SpeculationConfig
from ..integration.hook import enable
from ..integration.levels.load import DTYPES, hide_progress_bars, load_causal_lm
from ..integration.levels.resolve import nested_for
from .backend_end import BackendEnd
from .http_end import HttpEnd
from .http_server import make_app
from .limits import Limits
from .server import Options, read_keys, serve_model

_WORDS, _IDS = 512, 128  # characters, or ids, of a prompt by which requests are told to begin alike


@dataclass(frozen=True)
class Served:
    """What every replica serves. model, levels: names or folders, on every machine. dtype, device, slots, name,
    prefix_cache, api_key_file, chat_template: as of `mlspec serve`, the last a template. limits: of `Limits`.
    speculation: of `SpeculationConfig`."""

    model: str
    levels: list[str] = field(default_factory=list)
    dtype: str = "float32"
    device: str = "cpu"
    name: str | None = None
    slots: int = 8
    prefix_cache: int | str | None = None
    api_key_file: str | None = None
    chat_template: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Served:
        """ValueError that names what is unknown or missing, or cannot be."""
        known = {one.name: one for one in fields(cls)}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"args has {unknown[0]!r}; known are {', '.join(known)}")
        missing = [name for name, one in known.items()
                   if one.default is MISSING and one.default_factory is MISSING and name not in given]
        if missing:
            raise ValueError(f"args lacks {missing[0]!r}: name the folder of a model")
        found = cls(**given)
        found._check()
        found.options()
        return found

    def _check(self) -> None:
        if not isinstance(self.levels, (list, tuple)) or not all(isinstance(level, str) for level in self.levels):
            raise ValueError(f"args: levels is {self.levels!r}, it must be a list of words and folders")
        for name in ("model", "dtype", "device"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"args: {name} is {getattr(self, name)!r}, it must be a word or a folder")
        if self.dtype not in DTYPES:
            raise ValueError(f"args: dtype is {self.dtype!r}, choose one of {', '.join(DTYPES)}")
        if not isinstance(self.slots, int) or isinstance(self.slots, bool) or self.slots < 1:
            raise ValueError(f"args: slots is {self.slots!r}, it must be 1 or more answers decoded at a time")

    def options(self) -> Options:
        """Those of a server; ValueError for limits and settings that cannot be."""
        try:
            limits, config = Limits(**self.limits), SpeculationConfig.of(dict(self.speculation))
        except TypeError as error:
            raise ValueError(f"args: {error}") from error
        keys = [] if self.api_key_file is None else read_keys(self.api_key_file)
        return Options(self.name or self.model, self.slots, keys, limits, config,
                       prefix_cache=bytes_of(self.prefix_cache, "prefix_cache"))


class Replica:
    """A chain, and the application in front of it. Loads the model; all calls come from one event loop."""

    def __init__(self, served: Served) -> None:
        enable()
        hide_progress_bars()
        options = served.options()
        model, tokenizer = load_causal_lm(served.model, served.dtype, served.device)
        model = nested_for(model, list(served.levels))
        if served.chat_template is not None:
            tokenizer.chat_template = served.chat_template
        own, self._other = Pipe()
        self._end = BackendEnd(own)
        self._backend = serve_model(model, copy.deepcopy(tokenizer), list(served.levels), options, self._end)
        self._setup = options.setup(model, tokenizer)
        self._asking: HttpEnd | None = None  # in the event loop of the first request
        self._app: Any = None

    async def answered(self, method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]],
                       body: bytes) -> AsyncIterator[dict[str, Any]]:
        """What the application sends: the start of the answer and its pieces. Nobody reads on: nothing is decoded."""
        told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        unread, gone = [body], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
                 "path": path, "raw_path": path.encode(), "root_path": "", "query_string": query, "headers": headers,
                 "client": None, "server": None}  # fmt: skip
        answering = asyncio.ensure_future(self._application()(scope, receive, told.put))
        answering.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (message := await told.get()) is not None:
                yield message
            answering.result()
        finally:
            gone.set()
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await answering

    def require_healthy(self) -> None:
        """RuntimeError where nothing can be decoded any more."""
        error = self._backend.state.error
        if error is not None:
            raise RuntimeError(f"decoding has ended: {error}")

    def load(self) -> int:
        """Answers that are decoded or wait."""
        return self._backend.running + self._backend.waiting

    def close(self) -> None:
        """Decode no more; threads and connection end."""
        self._backend.cancel()
        self._backend.join(5.0)
        if self._asking is None:
            self._other.close()
        elif not self._asking.gone:
            self._asking.leave()

    def _application(self) -> Any:
        if self._app is None:
            self._asking = HttpEnd(self._other)
            self._asking.open()
            self._app = make_app(self._setup, self._asking)
        return self._app


def beginning_of(body: bytes) -> str:
    """A word for how a request's prompt begins, the same for those whose kept prefixes are of use for one another; ""
    for what is no request with a prompt."""
    try:
        asked = json.loads(body)
        prompt = asked.get("prompt", asked.get("messages"))
    except (ValueError, AttributeError, RecursionError):
        return ""
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        begins: Any = prompt[:_IDS]
    elif isinstance(prompt, list) and prompt:
        begins = json.dumps(prompt[0])[:_WORDS]
    elif isinstance(prompt, str) and prompt:
        begins = prompt[:_WORDS]
    else:
        return ""
    return hashlib.sha256(repr(begins).encode()).hexdigest()[:16]
