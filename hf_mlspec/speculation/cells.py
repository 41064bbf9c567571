"""Where in one line does every plan of a chain stand, so that all of them are reckoned at once?

A plan of two levels or more contains a shorter one, which drafts for its first level. So plans are reckoned from the
last level up: first all that are one level, then all of two, and so on. `Cells` has the indices for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .estimates import MOST
from .plans import LENGTHS, Plan, plan_of

TARGET = -1  # in the place of a level's index: who checks the first active level
_EACH = len(LENGTHS)
_PLACE = {length: place for place, length in enumerate(LENGTHS)}


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
