"""Which levels draft, how many tokens each, and for which rows? A plan for the coming rounds, what it is chosen for,
and all plans that a chain allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens of a draft that are tried
MOST_LEVELS = 5  # of which all combinations are tried; of longer chains those of the first ones


@dataclass(frozen=True)
class Plan:
    """Lengths of all levels, from the one below the target down.

    lengths: the most tokens that a level drafts before the next active level above it checks; 0: it takes no part. All
    0 is "off": the target alone.
    """

    lengths: tuple[int, ...]

    @cached_property
    def active(self) -> tuple[int, ...]:
        """The levels that take part."""
        return tuple(index for index, length in enumerate(self.lengths) if length)

    @cached_property
    def most(self) -> int:
        """Tokens that are drafted for the target, at most."""
        return next((length for length in self.lengths if length), 0)

    def told(self, names: Sequence[str]) -> str:
        """The plan in words: "off", or as in "mxfp4 8 + code-4m 4"."""
        parts = [f"{name} {length}" for name, length in zip(names, self.lengths, strict=True) if length]
        return " + ".join(parts) or "off"


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
    return [part.rpartition(" ")[0] for part in words.split(" + ")]


def off(count: int) -> Plan:
    """No level of `count` takes part."""
    return plan_of((0,) * count)


def choices(joined: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """The levels that may take part together, the fewest first.

    joined: per level whether it speaks the vocabulary of the level above it; if not, no level below it can draft for
    one above.
    """
    count = min(len(joined), MOST_LEVELS)
    for size in range(1, count + 1):
        for active in combinations(range(count), size):
            left_out = set(range(active[-1])) - set(active)
            if all(joined[index] for index in left_out):
                yield active
