"""What becomes of one request of a client: of all its answers, in the event loop that speaks HTTP?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from .asked import Asked
from .errors import ApiError, ending, failed, invalid
from .http_end import HttpEnd
from .messages import Ask, Ended, News
from .pieces import joined


@dataclass
class Choice:
    """One answer of a request: its place among them, what is asked for, and what is known of it.

    pieces: makes what is shown of tokens (PlainPieces, ParsedPieces). tokens: ids. logprobs: one entry a token.
    """

    index: int
    ask: Ask
    pieces: Any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def prompt(self) -> list[int]:
        """Ids."""
        return self.ask.input_ids


@dataclass
class Step:
    """What a choice gained: tokens, what is shown of them, and how it has ended, if it has."""

    choice: Choice
    tokens: list[int]
    shown: list[Any]
    logprobs: list[Any]
    levels: list[str | None]
    finish_reason: str | None = None


class Answer:
    """The choices of one request while they are decoded. Leaving it, however, cancels what is not done. every: as of
    `Ask`."""

    def __init__(self, backend: HttpEnd, asked: Asked, seconds: float, every: float | None) -> None:
        self.backend, self.asked = backend, asked
        self.choices: list[Choice] = []
        self._loop = asyncio.get_running_loop()
        self.every = every
        self._of: dict[int, Choice] = {}  # by the numbers of their requests
        self._news: asyncio.Queue[News | None] = asyncio.Queue()
        self._timer = self._loop.call_later(seconds, self._news.put_nowait, None)

    def add(self, prompt: list[int], new_tokens: int, seed: int | None, pieces: Any) -> None:
        """One more choice; it is not decoded before `start`."""
        ask = Ask(-1, prompt, self.every, self.asked.return_levels, seed, self.asked.top_logprobs,
                  {"max_new_tokens": new_tokens, **self.asked.options})
        self.choices.append(Choice(len(self.choices), ask, pieces))

    async def start(self) -> None:
        """Hand all choices to the backend; ApiError where it cannot take them."""
        await self.backend.submit([choice.ask for choice in self.choices], self._news.put_nowait)
        self._of = {choice.ask.number: choice for choice in self.choices}

    async def steps(self) -> AsyncIterator[list[Step]]:
        """What the choices gain, all that is known at a time, to the end of the last one. ApiError for what fails."""
        left = len(self.choices)
        try:
            while left:
                steps, error = self._told(await self._some())
                left -= sum(step.finish_reason is not None for step in steps)
                if steps:
                    yield steps
                if error is not None and left:  # else the answer was whole when its time was over
                    raise error
        finally:
            self.cancel()

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended by itself."""
        return all(choice.finish_reason is not None for choice in self.choices)

    async def _some(self) -> list[News | None]:
        """All news there are, at least one."""
        found = [await self._news.get()]
        while not self._news.empty():
            found.append(self._news.get_nowait())
        return found

    def cancel(self) -> None:
        """Whoever asked has all of it, or is gone."""
        self._timer.cancel()
        if left := [choice.ask.number for choice in self.choices if choice.finish_reason is None]:
            self.backend.cancel(left)

    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, each counted once, and of all answers."""
        prompts = sum(len(choice.prompt) for choice in self.choices[:: self.asked.n])
        new = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}

    def _told(self, found: list[News | None]) -> tuple[list[Step], ApiError | None]:
        """Steps, and what ends the answer behind them."""
        steps: list[Step] = []
        for news in found:
            if news is None:
                return steps, ApiError(504, "the answer took longer than a request may", kind="server_error",
                                       code="timeout")  # fmt: skip
            choice = self._of[news.number]
            choice.tokens += news.tokens
            choice.logprobs += news.logprobs
            step = Step(choice, news.tokens, choice.pieces.add(news.tokens), news.logprobs, news.levels)
            error = None if news.end is None else _error(news.end)
            if news.end is not None and error is None:
                step.finish_reason = choice.finish_reason = "length" if news.end.finish_reason == "length" else "stop"
                step.shown = joined(step.shown + choice.pieces.rest())
            steps.append(step)
            if error is not None:
                return steps, error
        return steps, None


def _error(end: Ended) -> ApiError | None:
    """What is said of an answer that did not end by itself."""
    if end.error is not None:
        return invalid(None, end.error) if end.refused else failed(end.error)
    return ending() if end.finish_reason == "cancelled" else None
