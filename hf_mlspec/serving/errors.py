"""How does the server say no? With the status and the body that OpenAI's clients know."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is not answered.

    status: of HTTP. kind: OpenAI's error type. code: its word for the case, if it has one. param: the field of the
    request that is wrong.
    """

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param

    def __reduce__(self) -> Any:
        """It is told from one process to another."""
        return _made, (self.status, self.message, self.kind, self.code, self.param)

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def _made(status: int, message: str, kind: str, code: str | None, param: str | None) -> ApiError:
    return ApiError(status, message, kind=kind, code=code, param=param)


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: a field that cannot be what it is."""
    return ApiError(400, message, code=code, param=param)


def busy(message: str) -> ApiError:
    """429: too many wait already."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full")


def failed(message: str) -> ApiError:
    """500: the request was fine."""
    return ApiError(500, message, kind="server_error", code="decoding_failed")


def ending() -> ApiError:
    """503: the server is being stopped."""
    return ApiError(503, "the server is shutting down; ask again later", kind="server_error", code="shutting_down")
