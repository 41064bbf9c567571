"""Of all plans, which one writes the tokens that are still to come in the least time?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .estimates import RowEstimates, odds_ratio
from .forecast import TARGET, Expectations, Forecast
from .plans import LENGTHS, Drafting, Plan, Situation, off, plan_of

_HORIZON = 64.0  # tokens that a row is expected to gain still, and as many as it has gained: it may end any time
_DIFFER = 1.3  # chances of the best row over those of the worst, from where on some rows alone may draft
_GROUPS = 3


class Search:
    """Plans for the rows of a situation, compared by what is known.

    rows: how each row differs from the others. Times are seconds for the tokens that all rows are expected to gain,
    reading what the levels of a plan lack included.
    """

    def __init__(self, situation: Situation, known: Expectations, rows: RowEstimates):
        self.situation, self.known, self.rows = situation, known, rows
        self.batch = len(situation.rooms)
        self.off = off(len(known.levels))

    @property
    def off_speed(self) -> float:
        """Tokens a second of the target alone."""
        return self.known.off(self.batch, self.situation.slots).speed

    def best(self, choices: Iterable[tuple[int, ...]], margin: float) -> tuple[Plan, Drafting]:
        """The plan of least time, and who drafts in it. choices: levels that may take part together. margin: what a
        plan must gain over "off"."""
        best, drafts = self.off, Drafting.all_of(self.batch)
        if not any(self.situation.rooms):
            return best, drafts
        least = self.time(self.off) * (1.0 - margin)
        for active in choices:
            for drafting in self._groups(active[0]):
                plan, time = self.lengths(active, drafting)
                if time < least:
                    best, least, drafts = plan, time, drafting
        return best, drafts

    def lengths(self, active: tuple[int, ...], drafting: Drafting | None = None) -> tuple[Plan, float]:
        """The best lengths for these levels, and their time."""
        times = self._times(active, drafting)
        place = int(times.argmin())
        return self._plan(active, place), float(times.flat[place])

    def time(self, plan: Plan, drafting: Drafting | None = None) -> float:
        """The time of one plan."""
        if not plan.active:
            return self._off_time()
        return float(self._times(plan.active, drafting)[self._at(plan)])

    def usual(self, plan: Plan, drafting: Drafting) -> Forecast:
        """A round of the plan in which these rows draft."""
        return self.known.of(plan, self.batch, len(drafting.rows), self.situation.slots, drafting.odds)

    def to_read(self, active: tuple[int, ...], drafting: Drafting) -> float:
        """Seconds in which these levels read what they lack of the rows that draft."""
        missing = [sum(line[r] for r in drafting.rows) for line in self.situation.missing]
        return self.known.reading(active, missing, self.situation.slots / 2)

    def to_prepare(self, plan: Plan) -> float:
        """Seconds until a round of the plan can begin, whatever its rows."""
        return 0.0

    def _plan(self, active: tuple[int, ...], place: int) -> Plan:
        """The plan of these levels at a place of their grid, its axes in a row."""
        at = np.unravel_index(place, (len(LENGTHS),) * len(active))
        lengths = dict(zip(active, (LENGTHS[one] for one in at), strict=True))
        return plan_of(tuple(lengths.get(index, 0) for index in range(len(self.known.levels))))

    def _at(self, plan: Plan) -> tuple[int, ...]:
        """Where the plan is in the grid of its levels."""
        return tuple(LENGTHS.index(plan.lengths[index]) for index in plan.active)

    def _off_time(self) -> float:
        return sum(self.left()) / self.known.off(self.batch, self.situation.slots).speed

    def _times(self, active: tuple[int, ...], drafting: Drafting | None) -> np.ndarray:
        """The times of all plans of these levels."""
        drafting = drafting or Drafting.all_of(self.batch)
        grid = self.known.grid(active, self.batch, len(drafting.rows), self.situation.slots, drafting.odds)
        return self.to_read(active, drafting) + sum(self.left()) / grid.speed

    def _groups(self, top: int) -> list[Drafting]:
        """Which rows may draft: all, and where rows differ also the half of them whose tokens are kept most often, a
        quarter, and so on."""
        batch = self.batch
        found = [Drafting.all_of(batch)]
        if batch > 1:
            mean = self.known.memory.pair(self.known.levels, top, TARGET).mean
            means = [self.rows.mean(r, mean) for r in range(batch)]
            order = sorted(range(batch), key=lambda r: -means[r])
            while len(found) < _GROUPS and batch > 1 and means[order[0]] > _DIFFER * means[order[-1]]:
                batch = (batch + 1) // 2
                rows = tuple(order[:batch])
                found.append(Drafting(rows, odds_ratio(sum(means[r] for r in rows) / batch, mean)))
        return found

    def left(self) -> list[float]:
        """Tokens that each row is expected to gain still."""
        lines = zip(self.situation.rooms, self.rows.gained, strict=True)
        return [min(room + 1.0, _HORIZON + gained) for room, gained in lines]
