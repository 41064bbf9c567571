"""How does the server start, on which address, and how does it end? uvicorn serves, and is told when to stop."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..integration.config import SpeculationConfig
from ..integration.stream.prompts import PREFILL_CHUNK
from .app import build_app
from .backend import Backend
from .chat import Chat
from .completions import Completions
from .endpoint import Endpoint
from .limits import Limits
from .metrics import Watch

_TO_TELL = 5.0  # seconds that answers have to be told of their end
_SWITCH = 0.0005  # seconds that the thread that decodes waits for one that answers, at most


@dataclass
class Served:
    """A model behind an application, not yet listening."""

    app: FastAPI
    backend: Backend


@dataclass
class Options:
    """How a model is served. name: what clients call it. slots: answers decoded at a time. keys: none: for anyone.
    prefill_chunk, prefix_cache: as of `generate_stream`. every: seconds between two events of a stream whose rounds
    are shorter; 0: every round is one."""

    name: str
    slots: int = 8
    keys: list[str] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    config: SpeculationConfig | None = None
    prefill_chunk: int | None = PREFILL_CHUNK
    prefix_cache: int | str | None = None
    every: float = 0.04


def serve_model(model: Any, tokenizer: Any, levels: list[Any], options: Options) -> Served:
    """The application of a model; its backend is to be started."""
    watch = Watch()
    backend = Backend(model, copy.deepcopy(tokenizer), levels, options.config, slots=options.slots,
                      queue_limit=options.limits.queue, watch=watch, prefill_chunk=options.prefill_chunk,
                      prefix_cache=options.prefix_cache)
    watch.look_at(backend)
    reading = ThreadPoolExecutor(1, "mlspec-reading")
    writing = copy.deepcopy(tokenizer)
    how = backend, options.name, options.limits, reading, options.every
    chat, completions = (Endpoint(style(model, tokenizer, writing), *how) for style in (Chat, Completions))
    return Served(build_app(chat, completions, options.limits, options.keys), backend)


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


class Server(uvicorn.Server):
    """uvicorn's, which at its end lets answers end: for `grace` seconds, and then they are told that it is over."""

    def __init__(self, config: uvicorn.Config, backend: Backend, grace: float) -> None:
        super().__init__(config)
        self.backend, self.grace = backend, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what is new, wait, tell the rest, close."""
        self.backend.close()
        over = asyncio.get_running_loop().call_later(self.grace, self.backend.cancel)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()


def run(served: Served, listening: socket.socket, grace: float) -> None:
    """Serve until a signal says to stop; then answers that run have `grace` seconds to end. The backend decodes
    already, and what is loaded stays: no collection of garbage looks at it again."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH)
    config = uvicorn.Config(served.app, log_level="warning", access_log=False, server_header=False,
                            timeout_graceful_shutdown=math.ceil(grace + _TO_TELL), timeout_keep_alive=60)
    try:
        Server(config, served.backend, grace).run(sockets=[listening])
    finally:
        served.backend.cancel()
        served.backend.join(_TO_TELL)


def read_keys(path: str) -> list[str]:
    """The keys of a file, one a line; lines that are empty or begin with # are none. ValueError if there is none."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {path!r} holds no key; write one a line")
    return keys
