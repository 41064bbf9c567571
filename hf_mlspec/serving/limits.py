"""How much may one request, and may all of them together, ask of the server?"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """What the server refuses, instead of growing without bound.

    prompt_tokens: of one prompt; 0: as many as the model has positions. new_tokens: of one answer, and of one that
    asks for no number. queue: answers that wait for a slot. body: bytes of one request. choices: answers of one
    request (`n` times its prompts). seconds: from a request's arrival to its last byte.
    """

    prompt_tokens: int = 0
    new_tokens: int = 1024
    queue: int = 256
    body: int = 1_000_000
    choices: int = 16
    seconds: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > (-1 if field.name == "prompt_tokens" else 0):
                raise ValueError(f"the limit {field.name} is {value!r}, it must be positive")
