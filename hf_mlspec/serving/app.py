"""Which routes are there, who may use them, and what do they answer? FastAPI does HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .endpoint import Endpoint, Reply
from .errors import ApiError, failed
from .http_end import HttpEnd
from .limits import Limits
from .metrics import Requests

_PATHS = {"/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"}
_PAGE = (("/", "index.html", "text/html"), ("/page.css", "page.css", "text/css"),
         ("/page.js", "page.js", "text/javascript"))  # fmt: skip
_TO_SAY_SO = 5.0  # seconds that an answer which took too long has to say so
_THROWN_AWAY = 16  # times the largest body
_NOBODY = 499  # the status of an answer that nobody reads
_LOG = logging.getLogger("mlspec.serving")


class Keys:
    """Who may ask: anyone if there are no keys. All keys are compared, each in constant time."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def require(self, request: Request) -> None:
        """ApiError 401 for a request without one of the keys."""
        if not self._digests:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        known = sum(hmac.compare_digest(digest, one) for one in self._digests)
        if kind.lower() != "bearer" or not known:
            raise ApiError(401, "Incorrect API key provided: send one as Authorization: Bearer KEY",
                           code="invalid_api_key")  # fmt: skip


class Bounded:
    """Around the application: a request ends after some seconds, read or not, and is counted.

    A client that reads slowly holds no more than its own answer; after that time its connection is closed.
    """

    def __init__(self, app: Any, counts: Requests, seconds: float) -> None:
        self.app, self.counts, self.seconds = app, counts, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def sending(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        path = scope["path"] if scope["path"] in _PATHS else "other"
        try:
            await asyncio.wait_for(self.app(scope, receive, sending), self.seconds)
        except (TimeoutError, asyncio.TimeoutError):
            _LOG.warning("a request to %s took more than %.0f seconds; its connection is closed", path, self.seconds)
        finally:
            self.counts.answered.labels(path, status).inc()


def build_app(chat: Endpoint, completions: Endpoint, limits: Limits, keys: list[str]) -> FastAPI:
    """The application: what uvicorn runs."""
    app = FastAPI(title="mlspec serve", docs_url=None, redoc_url=None, openapi_url=None)
    counts = Requests()
    app.add_middleware(Bounded, counts=counts, seconds=limits.seconds + _TO_SAY_SO)
    allowed, backend, began = Keys(keys), chat.backend, int(time.time())

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        allowed.require(request)
        return await _answered(request, chat, limits)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        allowed.require(request)
        return await _answered(request, completions, limits)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        allowed.require(request)
        model = {"id": chat.name, "object": "model", "created": began, "owned_by": "hf_mlspec"}
        return {"object": "list", "data": [model]}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        allowed.require(request)
        state = await backend.look(metrics=True)
        return Response(counts.text() + state.metrics, media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> Response:
        return await _health(backend)

    _show_page(app)
    _say_errors(app)
    return app


async def _health(backend: HttpEnd) -> Response:
    """Whether requests are decoded."""
    try:
        state = await backend.look()
    except ApiError as error:
        return JSONResponse({"status": "unhealthy", "reason": error.message}, 503)
    if state.error is not None:
        return JSONResponse({"status": "unhealthy", "reason": state.error}, 503)
    told = {"status": "ok", "running": state.running, "waiting": state.waiting}
    if state.levels_error is not None:
        told["levels"] = f"left out: {state.levels_error}"
    return JSONResponse(told)


def _show_page(app: FastAPI) -> None:
    """The page at /, from files of this package; it loads nothing from elsewhere."""
    headers = {"Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
               "X-Content-Type-Options": "nosniff"}
    for path, name, kind in _PAGE:
        content = (Path(__file__).parent / "page" / name).read_bytes()
        app.add_api_route(path, _file(content, kind, headers), methods=["GET"])


def _file(content: bytes, kind: str, headers: dict[str, str]) -> Callable[[], Any]:
    async def answered() -> Response:
        return Response(content, media_type=kind, headers=headers)

    return answered


def _say_errors(app: FastAPI) -> None:
    """Whatever fails is told as OpenAI tells it."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        said = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(said.body(), error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_NOBODY)

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, error: Exception) -> Response:
        return JSONResponse(failed(f"{type(error).__name__}: {error}").body(), 500)


async def _answered(request: Request, endpoint: Endpoint, limits: Limits) -> Response:
    reply = await endpoint.answer(await _body(request, limits.body))
    if reply.asked.stream:
        return _Streamed(reply)
    return await _whole(request, reply)


class _Streamed(StreamingResponse):
    """The events of a reply. However it ends, also before its first event, nothing is decoded for nobody."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.answer = reply.answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.cancel()


async def _whole(request: Request, reply: Reply) -> Response:
    """The answer, unless whoever asked goes away before it is there."""
    answered = asyncio.ensure_future(reply.whole())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            return Response(status_code=_NOBODY)
        return JSONResponse(answered.result())
    finally:
        reply.answer.cancel()
        for task in (answered, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, most: int) -> dict[str, Any]:
    """The JSON object that was sent. ApiError 413 for one that is too large, 400 for what is none.

    Of a body that says that it is too large some times as many bytes are read and thrown away: where a connection is
    closed before all has come, whoever sends it may lose the answer. Not of one that waits to be told to send.
    """
    large = ApiError(413, f"the body of a request has at most {most} bytes", code="request_too_large")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > most:
        if int(told) <= _THROWN_AWAY * most and not request.headers.get("expect"):
            async for _ in request.stream():
                pass
        raise large
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > most:
            raise large
    try:
        body = json.loads(read)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body of a request must be a JSON object")
    return body
