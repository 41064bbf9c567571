"""Which levels of a chain are not there yet, as no plan has used them, and what must be known of them until then?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..engines.engine import Engine
from .draft import Drafter
from .drafters.cross_tokenizer import CrossTokenizerDrafter
from .sampling import Sampler


@dataclass(frozen=True)
class Kind:
    """What a plan must know of a level. reads: it has a cache of its own, and must read a row before it drafts;
    positions: tokens of a row that it can attend to, None for all."""

    reads: bool
    positions: int | None

    @classmethod
    def of(cls, level: Drafter, runner: Engine | None) -> Kind:
        """The kind of a level that is there; runner: its engine, None for a lookup."""
        reads = runner is not None and runner.follow is None
        return cls(reads, getattr(inside(level), "max_positions", None))


@dataclass(frozen=True)
class Built:
    """Levels that have come: as in `Chain`, from the one below the target down; drafter: the first of them."""

    drafter: Drafter
    levels: Sequence[Drafter]
    runners: Sequence[Engine | None]
    samplers: Sequence[Sampler]


@dataclass(frozen=True)
class Deferred:
    """Levels that are built when a plan first uses them: calls that stay "off" are spared their engines and caches.

    names, kinds: of every level, from the one below the target down. follows: whether the first one drafts in the
    target's cache. build: builds them; what is wrong with them it raises, as a level that never drafted does. seconds:
    what that is expected to take, where it was not done in this process.
    """

    names: list[str]
    kinds: list[Kind]
    follows: bool
    build: Callable[[], Built]
    seconds: float = 0.0


def inside(level: Drafter) -> Drafter:
    """What drafts in a level's own vocabulary."""
    return level.inner if isinstance(level, CrossTokenizerDrafter) else level
