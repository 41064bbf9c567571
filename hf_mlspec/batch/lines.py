"""What does one line of a batch ask for, and which line is its answer? In the words of OpenAI's batch files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from ..serving.asked import known_fields

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ENVELOPE = ("custom_id", "method", "url", "body")
OWN_FIELDS = {CHAT: {"messages", "max_completion_tokens", "tools", "top_logprobs", "chat_template_kwargs"},
              COMPLETION: {"prompt"}}  # fmt: skip
_WRITTEN = '{"prompt": "..."}, {"messages": [...]} or {"custom_id": "...", "url": "/v1/completions", "body": {...}}'
_OF_STREAMS = ("stream", "stream_options")


class BadLine(Exception):
    """A line that asks for nothing; the rest of the input goes on."""


@dataclass(frozen=True)
class Line:
    """A request of a batch.

    url: CHAT or COMPLETION. body: what a server would get there. unread: fields of a simple line that no request has.
    """

    number: int
    custom_id: str | None
    url: str
    body: dict[str, Any]
    unread: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the answer is called: the same in every run."""
        return f"line-{self.number}"


def read_line(number: int, text: bytes, seed: int) -> Line:
    """The request of a line of an input. number: its place in the file, from 1. seed: of the job; a request that names
    no seed gets one of this and of its number. Raises BadLine, without the number, for what is no request."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"no JSON ({error}); each line is one object") from error
    if not isinstance(found, dict):
        raise BadLine(f"a {type(found).__name__}, no JSON object; write {_WRITTEN}")
    custom_id = found.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        raise BadLine(f"custom_id is {custom_id!r}, it must be a text")
    url, body, unread = _enveloped(found) if "body" in found else _simple(found)
    body = {name: value for name, value in body.items() if name not in _OF_STREAMS}
    if body.get("seed") is None:
        digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
        body["seed"] = int.from_bytes(digest[:7], "big")
    return Line(number, custom_id, url, body, unread)


def _enveloped(found: dict[str, Any]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    body, url, method = found["body"], found.get("url"), found.get("method", "POST")
    if not isinstance(body, dict):
        raise BadLine(f"body is a {type(body).__name__}, it must be an object")
    if unknown := sorted(set(found) - set(ENVELOPE)):
        raise BadLine(f"{', '.join(unknown)} beside body, which holds a request's fields; there are "
                      f"{', '.join(ENVELOPE)}")
    if method != "POST":
        raise BadLine(f"method is {method!r}, it must be POST")
    if url is None:
        url = CHAT if "messages" in body else COMPLETION
    if not isinstance(url, str) or url not in OWN_FIELDS:
        raise BadLine(f"url is {url!r}, it must be {' or '.join(OWN_FIELDS)}")
    return url, body, ()


def _simple(found: dict[str, Any]) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    url = CHAT if "messages" in found else COMPLETION if "prompt" in found else None
    if url is None:
        raise BadLine(f"neither prompt nor messages nor body; it has {', '.join(sorted(found)) or 'nothing'}: write "
                      f"{_WRITTEN}")
    known = known_fields(OWN_FIELDS[url])
    body = {name: value for name, value in found.items() if name in known and value is not None}
    return url, body, tuple(sorted(set(found) - known - set(ENVELOPE)))


def answered(line: Line, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The line of an answer. status: of HTTP; body: what a server would have sent."""
    error = body.get("error") if status != 200 else None
    return _told(line.number, line.custom_id, {"status_code": status, "request_id": line.name, "body": body},
                 error and {"code": error["code"] or error["type"], "message": error["message"]})


def unanswered(number: int, error: BadLine) -> dict[str, Any]:
    """The line that stands for one that asks for nothing."""
    return _told(number, None, None, {"code": "invalid_line", "message": str(error)})


def _told(number: int, custom_id: str | None, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{number}", "custom_id": custom_id, "line": number, "response": response, "error": error}
