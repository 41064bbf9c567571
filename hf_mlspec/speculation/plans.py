"""Which levels draft, how many tokens each, and for which rows? A plan for the coming rounds, what it is chosen for,
and all plans that a chain allows: where each stands in one line, so that all of them are reckoned at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from .estimates import MOST

if TYPE_CHECKING:
    from .memory import LevelCosts

TARGET = -1  # in the place of a level's index: who checks the first active level
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens of a draft that are tried
MOST_LEVELS = 5  # of which all combinations are tried; of longer chains those of the first ones
_EACH = len(LENGTHS)
_PLACE = {length: place for place, length in enumerate(LENGTHS)}
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
    mean. missing: per level the tokens of each row that it has not read yet. usual: what calls like this one begin
    with.
    """

    rooms: list[int]
    slots: float
    missing: list[list[int]]
    usual: Plan | None = None


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


def worth_a_window(seen: int, slots: float) -> bool:
    """Whether plans that see so many slots only may pay for rows that have `slots`; seen: 0 where there are none."""
    return 0 < _WORTH_A_WINDOW * seen < slots


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
        self.seen = seen

    def at(self, slots: float) -> tuple[tuple[int, ...], ...]:
        """For rows of so many slots, the fewest levels first."""
        return self.all if worth_a_window(self.seen, slots) else self.whole


def _combined(joined: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """joined: per level whether it speaks the vocabulary of the level above it; if not, no level below it can draft
    for one above."""
    count = min(len(joined), MOST_LEVELS)
    for size in range(1, count + 1):
        for active in combinations(range(count), size):
            left_out = set(range(active[-1])) - set(active)
            if all(joined[index] for index in left_out):
                yield active


@dataclass(frozen=True, eq=False)
class Step:
    """Parts of plans that have as many levels, each part under one checker.

    line: where they are. own, inner: per cell the pair at its top and the pair below that, each by its length: an
    index into ``[pairs, lengths]``. pair: of `inner`, the pair alone. below: the cell without its top level. parts:
    levels of each part, in order.
    """

    line: slice
    own: np.ndarray
    inner: np.ndarray
    pair: np.ndarray
    below: np.ndarray
    parts: tuple[tuple[int, ...], ...]


class Cells:
    """The plans of these choices, which are levels that may take part together, out of `count`.

    Plans stand choice by choice, the lengths of the last level changing fastest: ``[cells]``. Parts of plans stand
    by their number of levels: ``[line]``.

    pairs: (who drafts, who checks) that occur, those under the target first, `tops` of them; the others by checker,
    under: per checker where. ends: per part of one level its pair. steps: parts of more. at: per cell its place in
    the line. top: per cell the pair of its first level by its length, top_pair: without; choice: the number of its
    choice; of_choice: the choice by the first level's length; top_length: that; top_at: the pair by it, from 0 to one
    more than MOST. starts: of each choice.
    """

    def __init__(self, choices: tuple[tuple[int, ...], ...], count: int):
        self.choices, self.count = choices, count
        parts = {(active[place:], active[place - 1] if place else TARGET)
                 for active in choices for place in range(len(active))}  # fmt: skip
        ordered = sorted(parts, key=lambda one: (len(one[0]), one[1], one[0]))
        found = {(active[0], checker) for active, checker in parts}
        self.pairs = tuple(sorted(found, key=lambda pair: (pair[1], pair[0])))
        self.pair_at = {pair: place for place, pair in enumerate(self.pairs)}
        self.tops = sum(checker == TARGET for _, checker in self.pairs)
        self.under = {
            judge: slice(min(places), max(places) + 1)
            for judge in {checker for _, checker in self.pairs if checker != TARGET}
            for places in [[place for place, pair in enumerate(self.pairs) if pair[1] == judge]]
        }
        self._of_parts, start = {}, 0
        for part in ordered:
            self._of_parts[part], start = start, start + _EACH ** len(part[0])
        self.length = start
        self.ends = [self.pair_at[active[0], checker] for active, checker in ordered if len(active) == 1]
        self.steps = [self._step(size, ordered) for size in range(2, max(map(len, choices), default=0) + 1)]
        self._index(choices)

    def _step(self, size: int, ordered: list[tuple[tuple[int, ...], int]]) -> Step:
        parts = [part for part in ordered if len(part[0]) == size]
        each, under = _EACH**size, _EACH ** (size - 1)
        cell = np.arange(each)
        first, second = cell // under, cell % under // _EACH ** (size - 2)
        own = [self.pair_at[active[0], checker] * _EACH + first for active, checker in parts]
        pairs = [self.pair_at[active[1], active[0]] for active, _ in parts]
        below = [self._of_parts[active[1:], active[0]] + cell % under for active, _ in parts]
        begin = self._of_parts[parts[0]]
        return Step(
            slice(begin, begin + each * len(parts)),
            np.concatenate(own),
            np.concatenate([pair * _EACH + second for pair in pairs]),
            np.repeat(pairs, each),
            np.concatenate(below),
            tuple(active for active, _ in parts),
        )

    def _index(self, choices: tuple[tuple[int, ...], ...]) -> None:
        sizes = [_EACH ** len(active) for active in choices]
        self.starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
        self.start_of = dict(zip(choices, self.starts.tolist(), strict=True))
        self.choice = np.repeat(np.arange(len(choices)), sizes)
        place = np.arange(sum(sizes)) - self.starts[self.choice]
        under = np.array([size // _EACH for size in sizes])[self.choice]
        first = place // under
        self.at = place + np.array([self._of_parts[active, TARGET] for active in choices])[self.choice]
        self.top_pair = np.array([self.pair_at[active[0], TARGET] for active in choices])[self.choice]
        self.top = self.top_pair * _EACH + first
        self.of_choice = self.choice * _EACH + first
        self.top_length = np.array(LENGTHS, float)[first]
        self.top_at = self.top_pair * (2 + MOST) + np.array(LENGTHS)[first]

    def place_of(self, plan: Plan) -> int:
        """Where a plan stands; KeyError for levels that are none of the choices."""
        place = 0
        for index in plan.active:
            place = place * _EACH + _PLACE[plan.lengths[index]]
        return self.start_of[plan.active] + place

    def of_levels(self, active: tuple[int, ...]) -> slice:
        """Where the plans of a choice stand."""
        start = self.start_of[active]
        return slice(start, start + _EACH ** len(active))

    def plan_at(self, place: int) -> Plan:
        """The plan that stands there."""
        active, lengths = self.choices[self.choice[place]], [0] * self.count
        place -= self.start_of[active]
        for index in reversed(active):
            place, lengths[index] = place // _EACH, LENGTHS[place % _EACH]
        return plan_of(tuple(lengths))


@lru_cache(maxsize=64)
def cells_of(choices: tuple[tuple[int, ...], ...], count: int) -> Cells:
    """The cells of these choices out of so many levels; one object for each, with which figures are kept."""
    return Cells(choices, count)
