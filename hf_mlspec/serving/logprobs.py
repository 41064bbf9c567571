"""How are log probabilities written in an answer? By the text and the bytes of tokens."""

from __future__ import annotations

from typing import Any

from ..integration.stream.events import TokenLogprob


class TokenWords:
    """What a tokenizer writes for a single token."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        """An element of a chat's `logprobs.content`."""
        top = [self._one(token, value) for token, value in entry.top]
        return {**self._one(entry.token, entry.logprob), "top_logprobs": top}

    def completion_entries(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` of a completion."""
        texts = [self.text(entry.token) for entry in entries]
        return {"tokens": texts, "token_logprobs": [entry.logprob for entry in entries],
                "top_logprobs": [{self.text(token): value for token, value in entry.top} for entry in entries],
                "text_offset": [sum(map(len, texts[:place])) for place in range(len(texts))]}  # fmt: skip

    def _one(self, token: int, value: float) -> dict[str, Any]:
        text = self.text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def text(self, token: int) -> str:
        """A token alone: of a character that takes several, a part that is none."""
        return self.tokenizer.decode([token])
