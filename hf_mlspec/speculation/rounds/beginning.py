"""What do the caches of a chain get of a row that was read, in part or whole, before it joins?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from ...engines.engine import Engine
from ...engines.lanes import KeptState


@dataclass
class Beginning:
    """Keys and values of a row's first tokens, by the engine that wrote them, or would write the same bits.

    pieces: `[layers, 2, kv_heads, tokens, head_dim]`, one behind the other. counts: the tokens that are valid in them.
    states: behind these tokens, of engines whose layers keep one.
    """

    pieces: dict[Engine, list[Tensor]] = field(default_factory=dict)
    counts: dict[Engine, int] = field(default_factory=dict)
    states: dict[Engine, KeptState] = field(default_factory=dict)

    def add(self, engine: Engine, pieces: list[Tensor], count: int, state: KeptState | None = None) -> None:
        """What an engine's cache may be given."""
        self.pieces[engine], self.counts[engine] = pieces, count
        if state is not None:
            self.states[engine] = state

    def put(self, engine: Engine | None, row: int, held: int = 0) -> int:
        """Copy it into a row of the engine's cache, unless that holds as many tokens; how many it holds then."""
        count = self.counts.get(engine, 0)
        if count <= held:
            return held
        engine.hold(row, self.pieces[engine], count, self.states.get(engine))
        return count


Beginnings = dict[int, Beginning]  # by the number of the row that joins


def put(begun: Beginnings, engine: Engine | None, number: int, row: int, held: int = 0) -> int:
    """`Beginning.put` of a row, if anything of it was read."""
    return begun[number].put(engine, row, held) if number in begun else held


def engine_of(level: object) -> Engine | None:
    """The engine of a level, None of one that has none in its checker's vocabulary."""
    checker = getattr(level, "checker", None)
    return getattr(checker if checker is not None else level, "runner", None)


def engines_below(drafter: object | None) -> Iterator[Engine]:
    """Those of a drafter and of all below it."""
    while drafter is not None:
        if (engine := engine_of(drafter)) is not None:
            yield engine
        drafter = getattr(drafter, "inner", None)
