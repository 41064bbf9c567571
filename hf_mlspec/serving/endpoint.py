"""How is a request answered, whole or in a stream of server-sent events? The same for chats and completions."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .answer import Answer, Choice, Step
from .asked import Asked, read_asked
from .errors import ApiError, failed, invalid
from .http_end import HttpEnd
from .logprobs import TokenWords
from .messages import Setup


class Endpoint:
    """One of the two ways to ask.

    style: Chat or Completions. reading: the one thread that makes ids of text. A tokenizer is nothing for two: the
    event loop makes text of ids with another one, `style.writing`.
    """

    def __init__(self, style: Any, backend: HttpEnd, setup: Setup, reading: ThreadPoolExecutor) -> None:
        self.style, self.backend, self.reading = style, backend, reading
        self.name, self.limits, self.every = setup.name, setup.limits, setup.every
        facts = setup.facts
        self.positions, self.samples, self.vocab_size = facts.positions, facts.samples, facts.vocab_size
        self.words = TokenWords(style.writing)

    async def answer(self, body: dict[str, Any], *, name: str | None = None, created: int | None = None) -> Reply:
        """The request, with its place in the queue. ApiError for one that cannot be answered.

        name, created: of the answer, a word and a time in seconds; None: a word of its own, and now.
        """
        model = body.get("model")
        if model is not None and model != self.name:
            shown = repr(model)[:80]
            raise ApiError(404, f"The model {shown} does not exist; this server has {self.name!r}",
                           code="model_not_found", param="model")
        asked = read_asked(body, self.limits, set(self.style.fields), samples=self.samples)
        beyond = [token for (token,) in asked.options.get("sequence_bias", {}) if token >= self.vocab_size]
        if beyond:
            raise invalid("logit_bias", f"logit_bias has token {beyond[0]}, the vocabulary has {self.vocab_size}")
        read = asyncio.get_running_loop().run_in_executor(self.reading, self._read, body, asked)
        answer = Answer(self.backend, asked, self.limits.seconds, self._every(asked))
        try:
            for prompt, pieces in await read:
                room = self._room(prompt, asked)
                for seed, made in zip(asked.seeds, pieces, strict=True):
                    answer.add(prompt, room, seed, made)
            if (count := len(answer.choices)) > self.limits.choices:
                raise invalid("n", f"{count} answers are asked for, at most {self.limits.choices} are given")
            await answer.start()
        except BaseException:
            answer.cancel()  # its clock, too: it may be set for years
            raise
        return Reply(self, answer, name or uuid.uuid4().hex, int(time.time()) if created is None else created)

    def _every(self, asked: Asked) -> float | None:
        """Seconds between two events of an answer: those that tell levels show rounds; None: it is no stream."""
        if not asked.stream:
            return None
        return 0.0 if asked.return_levels else self.every

    def _read(self, body: dict[str, Any], asked: Asked) -> list[tuple[list[int], list[Any]]]:
        """Every prompt, and what shows each answer to it."""
        return [(prompt, [self.style.pieces(body, prompt, asked.stops) for _ in range(asked.n)])
                for prompt in self.style.prompts(body)]

    def _room(self, prompt: list[int], asked: Asked) -> int:
        """New tokens of an answer to this prompt."""
        most = min(self.limits.prompt_tokens or self.positions, self.positions - 1)
        if len(prompt) > most:
            raise invalid("messages" if "messages" in self.style.fields else "prompt",
                          f"the prompt has {len(prompt)} tokens, at most {most} are read", "context_length_exceeded")
        left = self.positions - len(prompt)
        if asked.new_tokens is None:
            return min(self.limits.new_tokens, left)
        if asked.new_tokens > left:
            raise invalid("max_tokens", f"the prompt has {len(prompt)} tokens and {asked.new_tokens} new ones are "
                                        f"asked for; together at most {self.positions} fit", "context_length_exceeded")
        return asked.new_tokens


class Reply:
    """What is sent of an answer."""

    def __init__(self, endpoint: Endpoint, answer: Answer, name: str, created: int) -> None:
        self.style, self.words, self.answer, self.asked = endpoint.style, endpoint.words, answer, answer.asked
        self.id = f"{self.style.prefix}-{name}"
        self.head = {"id": self.id, "created": created, "model": endpoint.name}
        self._begin = f"data: {json.dumps({**self.head, 'object': self.style.chunk_word})[:-1]}, "
        self.told = [self.style.told(choice.index, self.id) for choice in answer.choices]

    async def whole(self) -> dict[str, Any]:
        """The JSON of an answer that is not streamed."""
        async for steps in self.answer.steps():
            for step in steps:
                self.style.deltas(step, self.told[step.choice.index])
        choices = [self._whole(choice) for choice in self.answer.choices]
        return {**self.head, "object": self.style.word, "choices": choices, "usage": self.answer.usage()}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        told = self.told[choice.index]
        found = {"index": choice.index, **told.whole(), "finish_reason": told.ended(choice.finish_reason or ""),
                 "logprobs": self._logprobs(choice.logprobs)}  # fmt: skip
        if self.asked.return_token_ids:
            found |= {"token_ids": choice.tokens, "prompt_token_ids": choice.prompt}
        return found

    async def events(self) -> AsyncIterator[str]:
        """The lines of a stream, its last ones together; an error that comes after its beginning is its last event."""
        last = ""
        try:
            for choice in self.answer.choices:
                if (first := self.style.opening(choice)) is not None:
                    yield self._chunk(choice.index, first)
            async for steps in self.answer.steps():
                lines = "".join(line for step in steps for line in self._lines(step))
                if self.answer.is_over:
                    last = lines
                elif lines:
                    yield lines
            if self.asked.include_usage:
                last += self._line({"choices": [], "usage": self.answer.usage()})
        except ApiError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
            return
        except Exception as error:  # the status is sent already
            yield f"data: {json.dumps(failed(str(error)).body())}\n\n"
            raise
        yield f"{last}data: [DONE]\n\n"

    def _lines(self, step: Step) -> list[str]:
        """The chunks of a step. Ids and log probabilities go with its first one, which may have no text."""
        index, told = step.choice.index, self.told[step.choice.index]
        deltas = self.style.deltas(step, told)
        extra: dict[str, Any] = {}
        if step.logprobs:
            extra["logprobs"] = self._logprobs(step.logprobs)
        if self.asked.return_token_ids and step.tokens:
            extra["token_ids"] = step.tokens
        if self.asked.return_levels and step.tokens:
            extra |= {"levels": step.levels, "token_texts": [self.words.text(token) for token in step.tokens]}
        if extra:
            deltas = [{**(deltas[0] if deltas else self.style.empty()), **extra}, *deltas[1:]]
        lines = [self._chunk(index, delta) for delta in deltas]
        if step.finish_reason is not None:
            reason = told.ended(step.finish_reason)
            lines.append(self._chunk(index, self.style.empty(), reason))
        return lines

    def _chunk(self, index: int, part: dict[str, Any], reason: str | None = None) -> str:
        return self._line({"choices": [{"index": index, "logprobs": None, **part, "finish_reason": reason}]})

    def _line(self, chunk: dict[str, Any]) -> str:
        return f"{self._begin}{json.dumps(chunk)[1:]}\n\n"

    def _logprobs(self, entries: list[Any]) -> dict[str, Any] | None:
        return None if self.asked.top_logprobs is None else self.style.logprobs(entries, self.words)
