"""Of all plans, which one writes the tokens that are still to come in the least time, and what was decided?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

import numpy as np

from .estimates import MOST, RowEstimates, odds_ratio, reach
from .forecast import Expectations, Forecast
from .plans import LENGTHS, TARGET, Cells, Drafting, Plan, Situation, off, plan_of

_HORIZON = 64.0  # tokens that a row is expected to gain still, and as many as it has gained: it may end any time
_DIFFER = 1.3  # chances of the best row over those of the worst, from where on some rows alone may draft
_GROUPS = 3
_KNOWN = 6.0  # observations of a position that say something
_LOAD = 40.0  # times as long as it takes a pass can seem to take that was timed beside a load
_DEAR = 2.0  # times as long as one of the target alone a round of one token seems to take: it could never pay
_OFF_WEIGHT = 0.5  # of what rounds of "off" took, beside what calls like theirs were expected to take


@dataclass(frozen=True)
class Group:
    """As many rows draft whatever the plan, but not the same ones: per pair under the target which, and None where its
    rows do not differ enough."""

    rows: int
    of_pair: tuple[Drafting | None, ...]


@dataclass
class Choice:
    """What was decided for the coming rounds, and what is expected of each.

    limits: per row the most that is drafted for the target. off_speed: tokens a second that the target alone is
    expected to write; best_speed: those of the plan that was found best. trial: the plan is another one, to find out
    about it; of_costs: about what it takes; reading: seconds that its levels first read. switched: other levels
    drafted before, so that caches are cold in the first round. by_chances: drafted tokens of a round, before they are
    corrected by what rounds brought. over_usual: times as long as with it, what calls like this one begin with is
    expected to take. costs: by which seconds were predicted, see `Memory`.
    """

    plan: Plan
    limits: list[int]
    forecast: Forecast
    off_speed: float = 1.0
    best_speed: float = 1.0
    trial: bool = False
    of_costs: bool = False
    reading: float = 0.0
    switched: bool = False
    by_chances: float = 0.0
    over_usual: float = math.inf
    costs: int | None = None

    def correct_off(self, tokens: int, seconds: float) -> None:
        """Rounds of "off", which was chosen, brought so many tokens in so long: those of calls that begin with this
        choice are expected to be nearer to that. A clock that jumps counts as a factor of two."""
        if tokens and seconds:
            slower = min(max(seconds * self.off_speed / tokens, 0.5), 2.0) ** _OFF_WEIGHT
            self.off_speed, self.forecast = self.off_speed / slower, self.forecast.slower(slower)


class Search:
    """Plans for the rows of a situation, compared by what is known.

    rows: how each row differs from the others. cells: the plans. doubts: as of `Expectations`. Times are seconds for
    the tokens that all rows are expected to gain, reading what the levels of a plan lack included.
    """

    def __init__(
        self, situation: Situation, known: Expectations, rows: RowEstimates, cells: Cells, doubts: float = 0.0
    ):
        self.situation, self.known, self.rows, self.cells, self.doubts = situation, known, rows, cells, doubts
        self.batch = len(situation.rooms)
        self.off = off(len(known.levels))
        self._left = [min(room + 1.0, _HORIZON + gained)
                      for room, gained in zip(situation.rooms, rows.gained, strict=True)]  # fmt: skip
        self._all = Drafting.all_of(self.batch)
        self._of_all: np.ndarray | None = None

    def hoped(self) -> Search:
        """The same, where all chances are as good as they may well be."""
        other = copy(self)
        other.doubts, other._of_all = 1.0, None
        return other

    @property
    def off_speed(self) -> float:
        """Tokens a second of the target alone."""
        return self.known.off(self.batch, self.situation.slots).speed

    def best(self, margin: float) -> tuple[Plan, Drafting]:
        """The plan of least time, and who drafts in it. margin: what a plan must gain over "off"."""
        best, drafts = self.off, self._all
        if not any(self.situation.rooms) or not self.cells.choices:
            return best, drafts
        least = self.time(self.off) * (1.0 - margin)
        for group in self._groups():
            times = self._times(group)
            place = int(times.argmin())
            if times[place] < least:
                best, least = self.cells.plan_at(place), float(times[place])
                drafts = group.of_pair[self.cells.top_pair[place]] if group else self._all
        return best, drafts

    def better(self, than: float, apart: tuple[int, ...]) -> list[tuple[Plan, float]]:
        """The best lengths of all choices of levels, apart from one, that take less time where all rows draft; and
        their times."""
        if self.cells.choices == (apart,):
            return []
        faster = [active for active in self._faster(than) if active != apart]
        return [found for active in faster if (found := self.lengths(active))[1] < than]

    def lengths(self, active: tuple[int, ...]) -> tuple[Plan, float]:
        """The best lengths for these levels, all rows drafting, and their time."""
        place = self._best_of(active)
        return self.cells.plan_at(place), float(self._times()[place])

    def time(self, plan: Plan, drafting: Drafting | None = None) -> float:
        """The time of one plan."""
        if not plan.active:
            return self._off_time()
        if drafting is None or len(drafting.rows) == self.batch:
            return float(self._times()[self.cells.place_of(plan)])
        reading, round_ = self.to_read(plan.active, drafting), self.usual(plan, drafting)
        return reading + sum(self._left) / round_.speed

    def over_usual(self, best: Plan, drafting: Drafting) -> float:
        """Times as long as with the best plan, what calls like this one begin with takes; infinite if they cannot."""
        usual = self.situation.usual
        if usual is None or (usual.active and usual.active not in self.cells.choices):
            return math.inf
        return self.time(usual) / self.time(best, drafting)

    def usual(self, plan: Plan, drafting: Drafting) -> Forecast:
        """A round of the plan in which these rows draft."""
        return self.known.of(plan, self.batch, len(drafting.rows), self.situation.slots, drafting.odds)

    def to_read(self, active: tuple[int, ...], drafting: Drafting) -> float:
        """Seconds in which these levels read what they lack of the rows that draft."""
        missing, slots = self.situation.missing, self.situation.slots / 2
        return sum(self.known.reading(index, sum(missing[index][r] for r in drafting.rows), slots) for index in active)

    def shared(self, plan: Plan, drafting: Drafting, odds: list[float]) -> list[int]:
        """How much each row drafts in a plan: no token whose seconds would write more elsewhere. odds: that a token of
        the row is kept, over those of all."""
        slots, top = self.situation.slots, plan.active[0]
        worth = self.usual(plan, drafting).speed * self.known.of_a_token(plan, self.batch, slots)
        chances = self.known.chances(top, TARGET)[: plan.most]
        kept = [reach(chances, own) if r in drafting.rows else [] for r, own in enumerate(odds)]
        return [sum(chance >= worth for chance in line) for line in kept]

    def lost(self, plan: Plan, drafting: Drafting, speed: float) -> float:
        """Seconds that one round of the plan loses beside rounds of that many tokens a second, reading included."""
        round_ = self.known.of(plan, self.batch, len(drafting.rows), self.situation.slots)
        return self.to_read(plan.active, drafting) + round_.seconds - round_.tokens / speed

    def to_prepare(self, plan: Plan) -> float:
        """Seconds until a round of the plan can begin, whatever its rows."""
        return 0.0

    def left(self) -> list[float]:
        """Tokens that each row is expected to gain still."""
        return self._left

    def longer(self, best: Plan) -> Plan | None:
        """The best plan with a longer draft for the target, where little is known but of its own positions."""
        if not best.active or 2 * best.most > MOST:
            return None
        top = best.active[0]
        pair = self.known.memory.pair(self.known.levels, top, TARGET)
        longer = next(length for length in LENGTHS if length >= 2 * best.most)
        if pair.kept[best.most - 1].tried < _KNOWN or pair.kept[best.most].tried >= _KNOWN:
            return None
        return plan_of((*best.lengths[:top], longer, *best.lengths[top + 1 :]))

    def too_dear(self, speed: float) -> Iterator[Plan]:
        """Drafts of one token, by levels of which no round was ever timed, where costs forbid even that, as they would
        if they had been measured beside a load; without one they may write more than so many tokens a second."""
        slots, batch, known = self.situation.slots, self.batch, self.known
        alone = batch / known.off(batch, slots).speed
        for active in self.cells.choices:
            level = known.levels[active[0]]
            if len(active) > 1 or level.costs is None or known.memory.has_timed(active, batch):
                continue
            found, at = known.all_of(self.cells, batch, batch, slots, doubts=1.0), self.cells.start_of[active]
            seconds, whole = float(found.by_costs[at]), level.twin is None or level.twin > active[0]
            hoped = found.tokens[at] > speed * (alone + (seconds - alone) / _LOAD)
            if whole and hoped and seconds > _DEAR * alone:
                yield self.cells.plan_at(at)

    def _off_time(self) -> float:
        return sum(self._left) / self.off_speed

    def _best_of(self, active: tuple[int, ...]) -> int:
        """Where the best plan of these levels stands, all rows drafting."""
        where = self.cells.of_levels(active)
        return where.start + int(self._times()[where].argmin())

    def _faster(self, than: float) -> list[tuple[int, ...]]:
        """The choices that have a plan of less time."""
        if not self.cells.choices:
            return []
        least = np.minimum.reduceat(self._times(), self.cells.starts).tolist()
        return [active for active, one in zip(self.cells.choices, least, strict=True) if one < than]

    def _times(self, group: Group | None = None) -> np.ndarray:
        """The times of all plans, infinite for those without such a group; None: all rows draft."""
        if group is None:
            if self._of_all is None:
                self._of_all = self._added(self._rounds(), [self._all] * self.cells.tops)
            return self._of_all
        odds = tuple(1.0 if one is None else one.odds for one in group.of_pair)
        times = self._added(self._rounds(group.rows, odds), group.of_pair)
        if None in group.of_pair:
            times = np.where(np.array([one is None for one in group.of_pair])[self.cells.top_pair], np.inf, times)
        return times

    def _rounds(self, drafting: int | None = None, odds: tuple[float, ...] = ()) -> np.ndarray:
        """Seconds of all rounds of every plan."""
        slots = self.situation.slots
        found = self.known.all_of(self.cells, self.batch, drafting or self.batch, slots, odds, self.doubts)
        return sum(self._left) * found.seconds / found.tokens

    def _added(self, times: np.ndarray, of_pair: list[Drafting | None]) -> np.ndarray:
        """Times, with those of reading what the levels of a plan lack."""
        if not any(map(any, self.situation.missing)):
            return times
        cells = self.cells
        drafting = [of_pair[cells.pair_at[active[0], TARGET]] for active in cells.choices]
        late = [0.0 if rows is None else self.to_read(active, rows)
                for active, rows in zip(cells.choices, drafting, strict=True)]  # fmt: skip
        return times + np.array(late).take(cells.choice) if any(late) else times

    def _groups(self) -> Iterator[Group | None]:
        """Which rows may draft: all, and where rows differ also the half of them whose tokens are kept most often, a
        quarter, and so on."""
        yield None
        found = [self._best_rows(proposer) for proposer, _ in self.cells.pairs[: self.cells.tops]]
        for size in range(max(map(len, found))):
            of_pair = tuple(line[size] if size < len(line) else None for line in found)
            yield Group(next(len(one.rows) for one in of_pair if one is not None), of_pair)

    def _best_rows(self, top: int) -> list[Drafting]:
        batch, found = self.batch, []
        if batch == 1:
            return found
        mean = self.known.mean(top, TARGET)
        means = [self.rows.mean(r, mean) for r in range(batch)]
        order = sorted(range(batch), key=lambda r: -means[r])
        while len(found) + 1 < _GROUPS and batch > 1 and means[order[0]] > _DIFFER * means[order[-1]]:
            batch = (batch + 1) // 2
            rows = tuple(order[:batch])
            found.append(Drafting(rows, odds_ratio(sum(means[r] for r in rows) / batch, mean)))
        return found
