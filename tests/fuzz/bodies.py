"""What does the server answer to bodies that are malformed? The application itself is asked, without a socket."""

from __future__ import annotations

import asyncio
import json
import zlib
from concurrent.futures import Executor, Future
from functools import cache
from typing import Any

from transformers import AutoTokenizer

import hf_mlspec
from hf_mlspec.integration.stream.events import TokenLogprob
from hf_mlspec.serving.app import build_app
from hf_mlspec.serving.chat import Chat
from hf_mlspec.serving.completions import Completions
from hf_mlspec.serving.endpoint import Endpoint
from hf_mlspec.serving.limits import Limits
from hf_mlspec.serving.messages import Ended, Facts, News, Setup, State

from .harness import Wrong

PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
KEY = "a key"
LIMITS = Limits(body=4096, new_tokens=64, choices=4)


class _Here(Executor):
    """Works in the thread that asks."""

    def submit(self, function: Any, *args: Any, **options: Any) -> Future:
        found: Future = Future()
        try:
            found.set_result(function(*args, **options))
        except BaseException as error:
            found.set_exception(error)
        return found


class _Backend:
    """A backend that writes two tokens in no time."""

    async def submit(self, asks: list[Any], listener: Any) -> None:
        for number, ask in enumerate(asks):
            ask.number = number
            logprobs = [] if ask.logprobs is None else [TokenLogprob(token, -0.5, [(3, -1.0)]) for token in (40, 41)]
            listener(News(number, [40, 41], ["a level", None], logprobs))
            listener(News(number, end=Ended("length")))

    def cancel(self, numbers: list[int]) -> None:
        pass

    async def look(self, metrics: bool = False) -> State:
        return State(None, None, 0, 0)


@cache
def application() -> tuple[Any, asyncio.AbstractEventLoop]:
    """The server's, of the target that comes with the package, and a loop that it runs in."""
    tokenizer = AutoTokenizer.from_pretrained(str(hf_mlspec.demo_pair()[0]))
    tokenizer.chat_template = PLAIN
    setup = Setup(Facts("llama", 96, len(tokenizer), False), tokenizer, "demo", [KEY], LIMITS, 0.0, 0.0)
    chat, completions = (Endpoint(style(setup.facts, tokenizer, tokenizer), _Backend(), setup, _Here())
                         for style in (Chat, Completions))  # fmt: skip
    return build_app(chat, completions, LIMITS, [KEY]), asyncio.new_event_loop()


def post(body: bytes) -> None:
    """Send a body; the route, the headers and the pieces it comes in follow from its checksum. What comes back is an
    answer, or an error in OpenAI's words, and no failure of the server."""
    app, loop = application()
    odd = zlib.crc32(body)
    headers = [(b"authorization", b"Bearer " + (KEY.encode() if odd % 16 else b"another"))]
    if odd >> 4 & 1:
        length = len(body) if odd >> 5 & 7 else (odd >> 8) % 100_000
        headers.append((b"content-length", b"%d" % length if odd >> 11 & 7 else b"x"))
    chat = (b"messages" in body) != (odd >> 16 & 31 == 0)
    cut = len(body) // 2 if odd >> 21 & 1 else len(body)
    pieces = [{"type": "http.request", "body": body[:cut], "more_body": True},
              {"type": "http.request", "body": body[cut:], "more_body": False}]  # fmt: skip
    status, sent = loop.run_until_complete(_asked(app, "/v1/chat/completions" if chat else "/v1/completions", headers,
                                                  pieces))  # fmt: skip
    _require_answer(status, sent)


async def _asked(app: Any, path: str, headers: list, pieces: list) -> tuple[int, bytes]:
    status, sent, over = 0, bytearray(), asyncio.Event()

    async def receive() -> Any:
        if pieces:
            return pieces.pop(0)
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        sent.extend(message.get("body", b""))

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
             "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
             "client": ("here", 1), "server": ("here", 2)}  # fmt: skip
    await app(scope, receive, send)
    return status, bytes(sent)


def _require_answer(status: int, sent: bytes) -> None:
    if not 200 <= status < 500:
        raise Wrong(f"status {status}: {sent[:200]!r}")
    if sent.startswith(b"data: "):
        if not sent.endswith(b"data: [DONE]\n\n"):
            raise Wrong("a stream without its end")
        return
    told = json.loads(sent)
    if ("error" in told) == (status == 200):
        raise Wrong(f"status {status}: {sent[:200]!r}")
