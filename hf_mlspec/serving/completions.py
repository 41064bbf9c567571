"""How does `/v1/completions` read a prompt, and how does it say what was written?"""

from __future__ import annotations

from typing import Any

from .answer import Choice, Step
from .errors import invalid
from .messages import Facts
from .pieces import PlainPieces


class Completions:
    """`/v1/completions`: a text, ids, or a list of either. tokenizer, writing: as of Chat."""

    fields = frozenset({"prompt"})
    word, chunk_word, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, facts: Facts, tokenizer: Any, writing: Any) -> None:
        self.tokenizer, self.writing, self.vocab_size = tokenizer, writing, facts.vocab_size

    def prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """The ids of every prompt. ApiError 400 for what is none."""
        prompt = body.get("prompt")
        if isinstance(prompt, str) or _all(prompt, int):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt or not all(isinstance(p, str) or _all(p, int) for p in prompt):
            raise invalid("prompt", "prompt must be a text, a list of token ids, or a list of either, none of "
                                    "them empty")
        found = [self._ids(one) if isinstance(one, str) else one for one in prompt]
        if not all(found):
            raise invalid("prompt", "a prompt has no tokens; write at least one")
        if not all(0 <= token < self.vocab_size for ids in found for token in ids):
            raise invalid("prompt", f"a token id of a prompt is none of the vocabulary's, 0 to {self.vocab_size - 1}")
        return found

    def _ids(self, text: str) -> list[int]:
        """JSON may hold what is no text: half of a surrogate pair."""
        try:
            return self.tokenizer(text)["input_ids"]
        except (TypeError, UnicodeError) as error:
            raise invalid("prompt", f"a prompt cannot be read, is it whole? {text[:40]!r}") from error

    def pieces(self, body: dict[str, Any], prompt: list[int], stops: list[str]) -> PlainPieces:
        """What shows an answer to this prompt."""
        return PlainPieces(stops, self.writing)

    def opening(self, choice: Choice) -> None:
        """A text begins with its first piece."""

    def empty(self) -> dict[str, Any]:
        """A chunk without text."""
        return {"text": ""}

    def deltas(self, step: Step, told: Text) -> list[dict[str, Any]]:
        """What a step adds to a stream."""
        return [told.add(piece) for piece in step.shown]

    def told(self, index: int, answer_id: str) -> Text:
        """An empty answer."""
        return Text()

    def logprobs(self, entries: list[Any], words: Any) -> dict[str, Any]:
        """In the shape of a completion's answer."""
        return words.completion_entries(entries)


class Text:
    """An answer as its pieces come."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, piece: str) -> dict[str, Any]:
        """The part of a chunk that a piece is."""
        self.text += piece
        return {"text": piece}

    def ended(self, reason: str) -> str:
        """The reason, in the words of a completion."""
        return reason

    def whole(self) -> dict[str, Any]:
        """The text of an answer that was not streamed."""
        return {"text": self.text}


def _all(given: Any, kind: type) -> bool:
    return isinstance(given, list) and bool(given) and all(type(one) is kind for one in given)
