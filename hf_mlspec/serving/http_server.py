"""How does the process that speaks HTTP begin and end? uvicorn serves, and is told when to stop.

It has a Python of its own: beside a thread that decodes, the threads of HTTP would take turns with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import uvicorn
from fastapi import FastAPI

from .app import build_app
from .chat import Chat
from .completions import Completions
from .endpoint import Endpoint
from .http_end import HttpEnd
from .messages import Setup

TO_TELL = 5.0  # seconds that answers have to be told of their end


def make_app(setup: Setup, backend: HttpEnd) -> FastAPI:
    """The application of a model that a backend at the other end of a connection decodes."""
    reading, writing = ThreadPoolExecutor(1, "mlspec-reading"), copy.deepcopy(setup.tokenizer)
    chat, completions = (Endpoint(style(setup.facts, setup.tokenizer, writing), backend, setup, reading)
                         for style in (Chat, Completions))
    return build_app(chat, completions, setup.limits, setup.keys)


class HttpServer(uvicorn.Server):
    """uvicorn's, which at its end lets answers end: for `grace` seconds, and then they are told that it is over. It
    ends too where its backend does."""

    def __init__(self, setup: Setup, connection: Connection, log_level: str = "warning") -> None:
        self.backend, self.grace = HttpEnd(connection), setup.grace
        super().__init__(uvicorn.Config(
            make_app(setup, self.backend), log_level=log_level, access_log=False, server_header=False,
            timeout_graceful_shutdown=math.ceil(setup.grace + TO_TELL), timeout_keep_alive=60))  # fmt: skip

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Hear the backend, listen, and say so."""
        self.backend.on_end = self._leave
        self.backend.open()
        await super().startup(sockets)
        self.backend.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what is new, wait, tell the rest, close; the backend hears that HTTP is over."""
        self.backend.close()
        over = asyncio.get_running_loop().call_later(self.grace, self.backend.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()
            self.backend.leave()

    def _leave(self) -> None:
        self.should_exit = True


def speak_http(connection: Connection, listening: socket.socket) -> None:
    """The whole life of the process: until a signal says to stop, or the backend is gone.

    It leaves the terminal's group of processes: signals come from the process that decodes, once. What is loaded
    stays: no collection of garbage looks at it again.
    """
    os.setpgid(0, 0)
    try:
        setup: Setup = connection.recv()
    except EOFError:  # no model was loaded
        return
    server = HttpServer(setup, connection)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
