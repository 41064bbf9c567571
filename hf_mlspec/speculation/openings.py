"""Which plan do the calls of a chain begin with, and when does one choose anew?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .plans import Plan, worth_a_window

if TYPE_CHECKING:
    from .controller import Controller
    from .search import Choice

_MOST_CALLS = 8  # that begin with what an earlier one chose, until one chooses anew
_MOST_UNTOLD = 64  # of what a call did that made no controller, the next one is told so much
_MOST_AGREED = 3  # choices in a row that found the beginning of a call no worse, as of which it is settled;
_AGREED_OFF = 2  # for "off", of which rounds tell nothing of the levels
_NO_WORSE = 1.03  # times as long as with the best plan


@dataclass
class Opening:
    """What calls of one kind begin with. calls: that did so since it was chosen; until: how many may. agreed: choices
    in a row, of such calls and at their beginning, that found the same levels best, or this no worse."""

    choice: Choice
    calls: int = 0
    until: int = 1
    agreed: int = 0

    @property
    def patience(self) -> int:
        """Times as many rounds as of a plan that is new may pass until a call that began with it chooses."""
        return 1 << min(self.agreed, _MOST_AGREED if self.choice.plan.active else _AGREED_OFF)

    def agrees(self, choice: Choice) -> bool:
        """Whether another choice says that calls may go on to begin so."""
        return choice.plan.active == self.choice.plan.active or choice.over_usual < _NO_WORSE


@dataclass
class Openings:
    """What the calls of a chain begin with, so that a short one need not choose.

    found: by what calls have in common. choosing_seconds: what it took a call to make a controller and to choose, but
    for measuring costs, which the next one need not do. due: when costs are to be timed again, so that the next call
    makes a controller; affordable: from when on building the levels for that is little. disproved: whether rounds have
    shown that costs do not hold; by_trial: whether rounds of levels have, that costs spoke against. untold: what the
    last call began with that made no controller, and what the next controller is to be told of it.
    """

    found: dict[tuple, Opening] = field(default_factory=dict)
    choosing_seconds: float = 0.0
    due: float = math.inf
    affordable: float = 0.0
    disproved: bool = False
    by_trial: bool = False
    untold: tuple[Choice, list[Callable[[Controller], None]]] | None = None

    def begin(self, like: tuple) -> Choice | None:
        """What a call is to begin with; None where it is to choose: as the first one, and one in so many after it."""
        one = self.found.get(like)
        if one is None or one.calls >= one.until:
            return None
        one.calls += 1
        return replace(one.choice, limits=list(one.choice.limits))

    def learn(self, like: tuple, choice: Choice, seconds: float) -> None:
        """A call of this kind has chosen, which took so many seconds. Where it chose the same levels as the one before
        it, or they are hardly better, twice as many calls go on with that."""
        before, self.choosing_seconds = self.found.get(like), seconds
        if before is None or not before.agrees(choice):
            self.found[like] = Opening(choice)
            return
        same = before.choice.plan.active == choice.plan.active
        until, agreed = min(2 * before.until, _MOST_CALLS), before.agreed + 1
        self.found[like] = Opening(choice if same else before.choice, until=until, agreed=agreed)

    def agree(self, like: tuple, choice: Choice) -> bool:
        """A call that began with an earlier choice has made its own; -> whether calls may go on to begin so."""
        one = self.found.get(like)
        if one is None:
            return False
        one.agreed = one.agreed + 1 if one.agrees(choice) else 0
        return one.agreed > 0

    def patience(self, like: tuple) -> int:
        """Of what such calls begin with."""
        return self.found[like].patience if like in self.found else 1

    def usual(self, like: tuple | None) -> Plan | None:
        """What such calls begin with; None: nothing yet."""
        return self.found[like].choice.plan if like in self.found else None

    def tell(self, made: Controller) -> None:
        """What the last call did that made no controller."""
        if self.untold is not None:
            (first, early), self.untold, nothing = self.untold, None, made.choice
            made.start(len(first.limits))
            made.choice = first
            for what in early[-_MOST_UNTOLD:]:
                what(made)
            made.choice = nothing

    def disprove(self, by_trial: bool = False) -> None:
        """Rounds have shown that costs do not hold: they are due, once, and at once where the levels are built, of
        which a trial has shown it."""
        if by_trial and not self.by_trial:
            self.disproved, self.by_trial, self.due = True, True, 0.0
        elif not self.disproved:
            self.disproved, self.due = True, min(self.due, self.affordable)

    def doubt(self, like: tuple | None = None) -> None:
        """The next call of this kind is to choose; None: of every kind."""
        for key, one in list(self.found.items()):
            if like in (None, key):
                one.calls, one.agreed = one.until, 0


def alike(lengths: list[int], rooms: list[int], seen: int) -> tuple:
    """What calls have in common that begin alike: rows, and tokens of them and still to come up to a factor of two.
    """
    slots = sum(lengths) / len(lengths)
    return len(lengths), max(rooms).bit_length(), int(slots).bit_length(), worth_a_window(seen, slots)
