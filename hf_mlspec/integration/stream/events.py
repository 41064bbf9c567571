"""What does a stream yield before a request has ended, and how do its tokens become text piece by piece?"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from .request import Request

_UNFINISHED = "\ufffd"  # what a tokenizer writes for the first bytes of a character whose last ones are missing


@dataclass
class TokenLogprob:
    """How likely the target held a token: natural logarithms of its softmax, before any logits processor.

    top: the likeliest tokens at its place, with theirs, as many as were asked for.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprob]:
    """logits: float32 `[at least len(tokens), vocab]`. count: tokens in `top`."""
    if not tokens:
        return []
    found = torch.log_softmax(logits[: len(tokens)].float(), dim=-1)
    taken = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0].tolist()
    best = found.topk(count, dim=-1)
    lines = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [list(zip(ids, values, strict=True)) for ids, values in lines]
    return [TokenLogprob(*one) for one in zip(tokens, taken, tops, strict=True)]


@dataclass
class NewTokens:
    """The tokens that a request gained in one round of `generate_stream(..., events=True)`.

    tokens: ids; empty if only text is left to return. text: the text they add, if the stream has a tokenizer; "" while
    a character is incomplete. The texts of a request joined are the `text` of its completion, unless its tokenizer
    changes text it already wrote: some write one character for bytes that later bytes turn into another.
    levels: of every token the name of the level that drafted it, None where the target itself put it. logprobs: of
    every token, if the request asked for them.
    """

    request: Request
    tokens: list[int]
    text: str | None = None
    levels: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def id(self) -> Any:
        """The request's id."""
        return self.request.id


class TextPieces:
    """The text of a growing row of tokens, piece by piece.

    The text of a token may depend on the few before it. A piece is therefore the text of the last two groups of tokens
    minus the text of the first of them.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._tokens: list[int] = []
        self._first = self._said = 0  # tokens from _first on are decoded together; those before _said are said

    def add(self, tokens: list[int]) -> str:
        """What these tokens add; "" while their last character is not complete."""
        self._tokens += tokens
        piece = self._unsaid()
        if not piece or piece.endswith(_UNFINISHED):  # tokens without text say nothing about those behind them
            return ""
        self._first, self._said = self._said, len(self._tokens)
        return piece

    def rest(self) -> str:
        """What is left at the end of the row, incomplete as it may be."""
        piece = self._unsaid()
        self._first = self._said = len(self._tokens)
        return piece

    def _unsaid(self) -> str:
        before, now = (self._decode(self._tokens[self._first : end]) for end in (self._said, len(self._tokens)))
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False))
        return now[sum(1 for _ in alike) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
