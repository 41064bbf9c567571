"""What do the process that decodes and the one that speaks HTTP say to each other?

Each message is one object, pickled, over a connection of `multiprocessing`. Nothing of a model is in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..integration.stream.events import TokenLogprob
from .errors import ApiError
from .limits import Limits


@dataclass(slots=True)
class Facts:
    """What HTTP needs to know of a model. positions: tokens of a prompt and its answer together, at most. samples:
    whether its own settings sample."""

    model_type: str
    positions: int
    vocab_size: int
    samples: bool

    @classmethod
    def of(cls, model: Any) -> Facts:
        """Those of a model of transformers."""
        config = model.config.get_text_config()
        return cls(model.config.model_type, getattr(config, "max_position_embeddings", None) or 2**31,
                   config.vocab_size, bool(model.generation_config.do_sample))


@dataclass(slots=True)
class Setup:
    """What is served, and how: all that HTTP begins with. every: seconds between two events of a stream whose rounds
    are shorter; 0: every round is one. grace: seconds that running answers have to end."""

    facts: Facts
    tokenizer: Any
    name: str
    keys: list[str]
    limits: Limits
    every: float
    grace: float


@dataclass(slots=True)
class Ask:
    """A request of the stream. number: nobody else's. every, levels: as of `Ticket`. options: of generate."""

    number: int
    input_ids: list[int]
    every: float | None = 0.0
    levels: bool = False
    seed: int | None = None
    logprobs: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Ended:
    """How a request ended. finish_reason: as of `Completion`. refused: it could not be, and was never decoded."""

    finish_reason: str
    error: str | None = None
    refused: bool = False


@dataclass(slots=True)
class News:
    """What a request gained since this was told last: of each token its id and, where asked for, the level that
    drafted it and its log probability."""

    number: int
    tokens: list[int] = field(default_factory=list)
    levels: list[str | None] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Ended | None = None


@dataclass(slots=True)
class State:
    """How the backend is. error: what ended decoding. levels_error: why levels were left out. metrics: in Prometheus'
    text format, where asked for."""

    error: str | None
    levels_error: str | None
    running: int
    waiting: int
    metrics: bytes = b""


@dataclass(slots=True)
class Submit:
    """Take all of these, or none."""

    number: int
    asks: list[Ask]


@dataclass(slots=True)
class Cancel:
    """Decode these no further."""

    numbers: list[int]


@dataclass(slots=True)
class Look:
    """Say how the backend is. metrics: with all its numbers."""

    number: int
    metrics: bool = False


@dataclass(slots=True)
class Close:
    """Take no more requests. cancel: and end those that are here with the tokens they have."""

    cancel: bool = False


@dataclass(slots=True)
class Ready:
    """HTTP is answered from now on."""


@dataclass(slots=True)
class Replied:
    """To the Submit or the Look of this number."""

    number: int
    answer: State | ApiError | None


@dataclass(slots=True)
class Told:
    """What a round brought, of all requests at once."""

    news: list[News]
