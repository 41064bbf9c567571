"""What becomes of one request of a client: of its tickets, in the event loop that answers it?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ..integration.stream.events import NewTokens
from ..integration.stream.request import Completion
from .asked import Asked
from .backend import Backend, Ticket
from .errors import ApiError, ending, failed, invalid


@dataclass
class Choice:
    """One answer of a request: its place among them, its ticket, and what is known of it.

    pieces: makes what is shown of tokens (PlainPieces, ParsedPieces). tokens: ids. logprobs: one entry a token.
    """

    index: int
    ticket: Ticket
    prompt: list[int]
    pieces: Any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Step:
    """What a choice gained: tokens, what is shown of them, and whether it has ended."""

    choice: Choice
    tokens: list[int]
    shown: list[Any]
    logprobs: list[Any]
    levels: list[str | None]


class Answer:
    """The choices of one request while they are decoded. Leaving it, however, cancels what is not done."""

    def __init__(self, backend: Backend, asked: Asked, seconds: float) -> None:
        self.backend, self.asked = backend, asked
        self.choices: list[Choice] = []
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, NewTokens | Completion | None]] = asyncio.Queue()
        self._timer = self._loop.call_later(seconds, self._events.put_nowait, (0, None))

    def add(self, prompt: list[int], new_tokens: int, seed: int | None, pieces: Any) -> None:
        """One more choice; it is not decoded before `start`."""
        index = len(self.choices)
        ticket = Ticket(prompt, self._listener(index), seed=seed, id=index, logprobs=self.asked.top_logprobs,
                        max_new_tokens=new_tokens, **self.asked.options)
        self.choices.append(Choice(index, ticket, prompt, pieces))

    def start(self) -> None:
        """Hand all choices to the backend; ApiError where it cannot take them."""
        try:
            self.backend.submit([choice.ticket for choice in self.choices])
        except ApiError:
            self._timer.cancel()
            raise

    async def steps(self) -> AsyncIterator[Step]:
        """What the choices gain, to the end of the last one. ApiError for what fails."""
        left = len(self.choices)
        try:
            while left:
                index, event = await self._events.get()
                if event is None:
                    raise ApiError(504, "the answer took longer than a request may", kind="server_error",
                                   code="timeout")  # fmt: skip
                step = self._step(self.choices[index], event)
                left -= step.choice.finish_reason is not None
                yield step
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Whoever asked has all of it, or is gone."""
        self._timer.cancel()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.ticket.cancel()

    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, each counted once, and of all answers."""
        prompts = sum(len(choice.prompt) for choice in self.choices[:: self.asked.n])
        new = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}

    def _listener(self, index: int) -> Any:
        """Called in the thread that decodes; of a loop that has ended nobody listens."""

        def tell(ticket: Ticket, event: NewTokens | Completion) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return tell

    def _step(self, choice: Choice, event: NewTokens | Completion) -> Step:
        if isinstance(event, NewTokens):
            choice.tokens += event.tokens
            choice.logprobs += event.logprobs
            shown = choice.pieces.add(event.tokens, event.text or "")
            return Step(choice, event.tokens, shown, event.logprobs, event.levels)
        if event.error is not None:
            refused = event.speculation is None and isinstance(event.error, ValueError | TypeError)
            raise invalid(None, str(event.error)) if refused else failed(str(event.error))
        if event.finish_reason == "cancelled":
            raise ending()
        choice.finish_reason = "length" if event.finish_reason == "length" else "stop"
        return Step(choice, [], choice.pieces.rest(), [], [])
