"""What does a client see of an answer that grows? Text up to a stop, or what the model's template makes of it."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser

from ..integration.stream.events import TextPieces


class Cut:
    """Text up to the first of some stops, which is not shown; what may be the beginning of one is held back.

    The first stop is the one that is complete first: there decoding ended.
    """

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.held, self.done = stops, "", False

    def add(self, text: str) -> str:
        """What of the text so far can be shown now."""
        if self.done or not self.stops:
            return "" if self.done else text
        self.held += text
        found = [(place + len(stop), place) for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if found:
            _, place = min(found)
            shown, self.held, self.done = self.held[:place], "", True
            return shown
        keep = max(_begun(self.held, stop) for stop in self.stops)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown

    def rest(self) -> str:
        """What was held back; the answer has ended."""
        shown, self.held = self.held, ""
        return shown


def _begun(text: str, stop: str) -> int:
    """How many of the last characters of a text may be the beginning of a stop."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class PlainPieces:
    """The text of tokens, without special ones. tokenizer: transformers'."""

    def __init__(self, stops: list[str], tokenizer: Any) -> None:
        self.cut, self.text = Cut(stops), TextPieces(tokenizer)

    def add(self, tokens: list[int]) -> list[Any]:
        """The pieces that these tokens add."""
        shown = self.cut.add(self.text.add(tokens))
        return [shown] if shown else []

    def rest(self) -> list[Any]:
        """The last pieces."""
        shown = self.cut.add(self.text.rest()) + self.cut.rest()
        return [shown] if shown else []


class ParsedPieces:
    """Text, reasoning and tool calls, as the response template of the model tells them apart.

    tokenizer: of the tokenizers library. parser: transformers' own, which reads special tokens too.
    """

    def __init__(self, stops: list[str], tokenizer: Any, parser: ResponseParser) -> None:
        self.cut, self.tokenizer, self.parser = Cut(stops), tokenizer, parser
        self._decoding = DecodeStream([], skip_special_tokens=False)
        self._first = response_events_to_chunks(parser.initial_events)

    def add(self, tokens: list[int]) -> list[Any]:
        """The pieces that these tokens add: str, ReasoningText or ToolCall."""
        parts = (self._decoding.step(self.tokenizer, token) for token in tokens)
        return self._fed(self.cut.add("".join(part for part in parts if part)))

    def rest(self) -> list[Any]:
        """The last pieces; of a region that was not closed, what the parser can tell."""
        pieces = self._fed(self.cut.rest())
        try:
            _, events = self.parser.finalize()
        except (ValueError, RuntimeError):  # the answer ended in the middle of a tool call: there is none
            return pieces
        return pieces + response_events_to_chunks(events)

    def _fed(self, text: str) -> list[Any]:
        pieces, self._first = self._first, []
        return joined(pieces + (response_events_to_chunks(self.parser.feed(text)) if text else []))


def joined(pieces: list[Any]) -> list[Any]:
    """The pieces, with texts of one kind that follow each other as one."""
    found: list[Any] = []
    for piece in pieces:
        if found and isinstance(piece, str) and type(found[-1]) is type(piece):
            found[-1] = type(piece)(found[-1] + piece)
        else:
            found.append(piece)
    return found


__all__ = ["Cut", "ParsedPieces", "PlainPieces", "ReasoningText", "ToolCall", "joined"]
