"""Which levels draft, how many tokens each, and for which rows? A plan for the coming rounds, what it is chosen for,
and all plans that a chain allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .memory import LevelCosts

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens of a draft that are tried
MOST_LEVELS = 5  # of which all combinations are tried; of longer chains those of the first ones
_SEEING = ", seeing "  # in the words of a plan: how many slots, where not all
_WORTH_A_WINDOW = 1.25  # times the slots that are seen, from where on leaving the others out may pay


@dataclass(frozen=True)
class Plan:
    """Lengths of all levels, from the one below the target down.

    lengths: the most tokens that a level drafts before the next active level above it checks; 0: it takes no part. All
    0 is "off": the target alone.
    """

    lengths: tuple[int, ...]

    def split(self) -> tuple[Plan, bool]:
        """Of a chain whose levels are there twice, without a draft window and with it: the plan of the levels, and
        whether they have the window."""
        half = len(self.lengths) // 2
        windowed = any(self.lengths[half:])
        return plan_of(self.lengths[half:] if windowed else self.lengths[:half]), windowed

    @cached_property
    def active(self) -> tuple[int, ...]:
        """The levels that take part."""
        return tuple(index for index, length in enumerate(self.lengths) if length)

    @cached_property
    def most(self) -> int:
        """Tokens that are drafted for the target, at most."""
        return next((length for length in self.lengths if length), 0)

    def told(self, names: Sequence[str], slots: int = 0) -> str:
        """The plan in words: "off", or as in "mxfp4 8 + code-4m 4"; slots: that its levels see, 0 for all."""
        parts = [f"{name} {length}" for name, length in zip(names, self.lengths, strict=True) if length]
        return " + ".join(parts) + (f"{_SEEING}{slots} tokens" if slots else "") if parts else "off"


@dataclass(frozen=True)
class Situation:
    """The rows of a round.

    rooms: tokens each may still gain, but the one that every round adds. slots: that a token of them attends to, the
    mean. missing: per level the tokens of each row that it has not read yet.
    """

    rooms: list[int]
    slots: float
    missing: list[list[int]]


@dataclass(frozen=True)
class Drafting:
    """Which rows draft in a plan, and the odds that their tokens are kept over those of all rows."""

    rows: tuple[int, ...]
    odds: float = 1.0

    @classmethod
    def all_of(cls, batch: int) -> Drafting:
        """Every row."""
        return cls(tuple(range(batch)))


@lru_cache(maxsize=4096)
def plan_of(lengths: tuple[int, ...]) -> Plan:
    """The plan of these lengths; one object for each, as they are compared again and again."""
    return Plan(lengths)


def names_of(words: str) -> list[str]:
    """The levels that take part in a plan told in words."""
    return [part.rpartition(" ")[0] for part in words.partition(_SEEING)[0].split(" + ")]


def off(count: int) -> Plan:
    """No level of `count` takes part."""
    return plan_of((0,) * count)


class Choices:
    """The levels that may take part together.

    levels: from the one below the target down. seen: slots that a draft window leaves in view, 0: there is none. With
    one every level is there twice: as it is, and in the same order again with the window, which all levels of a plan
    share. Levels of which none can have it are weighed once.
    """

    def __init__(self, levels: Sequence[LevelCosts], seen: int = 0):
        count = len(levels) // 2 if seen else len(levels)
        self.whole = tuple(_combined([level.joined for level in levels[:count]]))
        parts = {index for index, one in enumerate(levels) if one.costs is not None and one.costs.most_slots}
        shifted = tuple(tuple(index + count for index in active) for active in self.whole if seen)
        self.all = (*self.whole, *(active for active in shifted if parts.intersection(active)))
        self.border = _WORTH_A_WINDOW * seen

    def at(self, slots: float) -> tuple[tuple[int, ...], ...]:
        """For rows of so many slots, the fewest levels first."""
        return self.all if slots > self.border else self.whole


def _combined(joined: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """joined: per level whether it speaks the vocabulary of the level above it; if not, no level below it can draft
    for one above."""
    count = min(len(joined), MOST_LEVELS)
    for size in range(1, count + 1):
        for active in combinations(range(count), size):
            left_out = set(range(active[-1])) - set(active)
            if all(joined[index] for index in left_out):
                yield active
