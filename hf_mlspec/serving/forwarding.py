"""How does a process without a model let another one answer a request, and what does it say where that one dies?

An answer that is not a stream is sent when all of it is there: until then another replica can be asked. A stream whose
replica dies ends with an event that says so. No request is left without an answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .errors import ApiError
from .replica import beginning_of

Ask = Callable[[str, tuple], AsyncGenerator[dict[str, Any]]]
_ATTEMPTS = 3  # replicas that are asked
_LOG = logging.getLogger("mlspec.serving")


async def forwarded(request: Request, ask: Ask, most: int) -> Response:
    """The answer of a replica. ask(beginning, parts): what one sends, of those that may have kept the beginning; it
    raises where its replica dies. most: bytes of a request."""
    try:
        body = await _body(request, most)
    except ClientDisconnect:
        return Response(status_code=499)
    if body is None:
        error = ApiError(413, f"the body of a request has at most {most} bytes", code="request_too_large")
        return JSONResponse(error.body(), error.status)
    headers = [(name, value) for name, value in request.headers.raw if name != b"content-length"]
    parts = (request.method, _path(request), request.url.query.encode(), headers, body)
    beginning, said = beginning_of(body) if request.method == "POST" else "", "none is there"
    for _ in range(_ATTEMPTS):
        messages = ask(beginning, parts)
        try:
            start = await anext(messages)
            if _is_stream(start):
                first = await anext(messages)
                return _answer(start, StreamingResponse(_events(messages, first)))
            async with aclosing(messages):
                return _answer(start, Response(b"".join([one.get("body", b"") async for one in messages])))
        except Exception as error:  # of Ray, or of a replica that dies: several kinds
            said = next(iter(str(error).splitlines()), type(error).__name__)
            _LOG.warning("a replica did not answer %s: %s", parts[1], said)
    error = _lost(said)
    return JSONResponse(error.body(), error.status)


async def _events(messages: AsyncGenerator[dict[str, Any]], first: dict[str, Any]) -> AsyncIterator[bytes]:
    try:
        async with aclosing(messages):
            yield first.get("body", b"")
            async for one in messages:
                yield one.get("body", b"")
    except Exception as error:  # the status is sent already
        said = next(iter(str(error).splitlines()), type(error).__name__)
        yield f"data: {json.dumps(_lost(said).body())}\n\n".encode()


def _path(request: Request) -> str:
    """Behind the prefix of the application, such as its `route_prefix`."""
    prefix, path = request.scope.get("root_path", "").rstrip("/"), request.scope["path"]
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


async def _body(request: Request, most: int) -> bytes | None:
    """None for one that is too large."""
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > most:
            return None
    return bytes(read)


def _is_stream(start: dict[str, Any]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])


def _answer(start: dict[str, Any], response: Response) -> Response:
    response.status_code = start["status"]
    length = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
    response.raw_headers = [*(pair for pair in start["headers"] if pair[0] != b"content-length"), *length]
    return response


def _lost(said: str) -> ApiError:
    return ApiError(503, f"the replica that answered is gone: {said}; ask again", kind="server_error",
                    code="replica_lost")
