"""How does the server start, on which address, and how does it end? Decoding is here; HTTP has its own process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ..integration.config import SpeculationConfig
from ..integration.stream.prompts import PREFILL_CHUNK
from .backend import Backend
from .backend_end import BackendEnd
from .http_server import TO_TELL, speak_http
from .limits import Limits
from .messages import Facts, Setup
from .metrics import Watch


@dataclass
class Options:
    """How a model is served. name: what clients call it. slots: answers decoded at a time. keys: none: for anyone.
    prefill_chunk, prefix_cache: as of `generate_stream`. every, grace: as of `Setup`."""

    name: str
    slots: int = 8
    keys: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    config: SpeculationConfig | None = None
    prefill_chunk: int | None = PREFILL_CHUNK
    prefix_cache: int | str | None = None
    every: float = 0.04
    grace: float = 30.0

    def setup(self, model: Any, tokenizer: Any) -> Setup:
        """What HTTP begins with."""
        return Setup(Facts.of(model), tokenizer, self.name, self.keys, self.limits, self.every, self.grace)


def serve_model(model: Any, tokenizer: Any, levels: list[Any], options: Options, end: BackendEnd) -> Backend:
    """A backend that decodes, and hears of requests at its end of a connection. Raises what is wrong with the
    levels."""
    watch = Watch()
    backend = Backend(model, tokenizer, levels, options.config, slots=options.slots, queue_limit=options.limits.queue,
                      watch=watch, tell=end.tell, prefill_chunk=options.prefill_chunk,
                      prefix_cache=options.prefix_cache)
    watch.look_at(backend)
    backend.start()
    end.serve(backend, watch)
    return backend


def listen(host: str, port: int) -> socket.socket:
    """A socket of the address. ValueError where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(2048)
    except (OSError, OverflowError) as error:
        found.close()
        raise ValueError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}; choose "
                         "another --port or --host") from error
    return found


class Http:
    """The process that speaks HTTP. It begins to import while a model is loaded here, and ends with this process."""

    def __init__(self, listening: socket.socket) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of a model or a device that is in use here
        own, other = context.Pipe()
        self.end = BackendEnd(own)
        self.process = context.Process(target=speak_http, args=(other, listening), name="mlspec-http", daemon=True)
        self.process.start()
        other.close()  # else its death would not end the connection

    def begin(self, setup: Setup) -> None:
        """Back when requests are answered. ChildProcessError where that never happens."""
        self.end.send(setup)
        self.end.ready.wait()
        if self.end.gone:
            raise ChildProcessError(f"the process that speaks HTTP {self._left()}")

    def run(self, backend: Backend) -> None:
        """Until a signal says to stop; then answers that run have `grace` seconds to end. ChildProcessError where HTTP
        ends by itself."""
        stopped: list[int] = []

        def stop(number: int, _: FrameType | None) -> None:
            stopped.append(number)
            if self.process.pid is not None and self.process.is_alive():
                os.kill(self.process.pid, number)

        with _on_signals(stop):
            self.process.join()
            backend.cancel()
            backend.join(TO_TELL)
        if not stopped:
            raise ChildProcessError(f"the process that speaks HTTP {self._left()}")

    def close(self) -> None:
        """End it, if it runs."""
        self.end.connection.close()
        self.process.terminate()
        self.process.join()

    def _left(self) -> str:
        self.process.join(TO_TELL)
        return f"has ended with status {self.process.exitcode}"


@contextlib.contextmanager
def _on_signals(call: Any) -> Iterator[None]:
    """What to do when this process is told to stop."""
    before = {number: signal.signal(number, call) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


def read_keys(path: str) -> list[str]:
    """The keys of a file, one a line; lines that are empty or begin with # are none. ValueError if there is none, or
    the file is no text."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"--api-key-file {path!r} is no UTF-8 text ({error.reason} at byte {error.start}); write one "
                         "key a line") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {path!r} holds no key; write one a line")
    return keys
