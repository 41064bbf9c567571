"""What does a stream hand out before a request has ended, and how do its tokens become text piece by piece?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .request import Request

_UNFINISHED = "\ufffd"  # what a tokenizer writes for the first bytes of a character whose last ones are missing


@dataclass
class NewTokens:
    """What a request gained in one round of `generate_stream(..., events=True)`.

    tokens: ids; none where nothing but text is left to say. text: what they add to the request's text, where the
    stream has a tokenizer; "" while a character is not complete. All texts of a request, one behind the other, are
    the `text` of its completion, unless its tokenizer takes back what it wrote (clean_up_tokenization_spaces).
    """

    request: Request
    tokens: list[int]
    text: str | None = None

    @property
    def id(self) -> Any:
        """The request's id."""
        return self.request.id


class TextPieces:
    """The text of a growing row of tokens, piece by piece.

    How a token is written may depend on the few before it, so each piece is what the tokens since the last but one
    piece add to those of the last piece.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._tokens: list[int] = []
        self._first = self._said = 0  # tokens from _first on are decoded together; those before _said are said
        self._text = ""

    def add(self, tokens: list[int]) -> str:
        """What these tokens add; "" while their last character is not complete."""
        self._tokens += tokens
        before = self._decode(self._tokens[self._first : self._said])
        now = self._decode(self._tokens[self._first :])
        if now.endswith(_UNFINISHED) or not now.startswith(before):
            return ""
        self._first, self._said = self._said, len(self._tokens)
        return self._say(now[len(before) :])

    def rest(self, whole: str) -> str:
        """What is left of the whole text of the request."""
        return self._say(whole[len(self._text) :]) if whole.startswith(self._text) else ""

    def _say(self, piece: str) -> str:
        self._text += piece
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
