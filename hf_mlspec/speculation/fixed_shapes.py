"""Which plan is best where a round does the same work whatever is accepted, as when it is replayed on a GPU?

Every row drafts as much as the longest, rows that are done early are padding, and the rows themselves are padded to a
bucket. With b rows of a bucket, S slots that a token attends to and the names of controller.py:

    draft of the last level     t(b lead) + (k - 1) t(b)             lead: the last token, and one for each level above
    draft of a lookup           next to nothing
    draft, checked              R (draft of d tokens + t(b (d + lead)))      R = ceil(length / (d + 1)): it has
                                                                     D = R (d + 1) tokens at most
    check                       T(b (D + 1))
    tokens of a round           B (1 + sum over i <= E p_i)          E: expected length of the draft, D without levels
                                                                     in the middle
    rounds of B rows            L / u (1 + m(B) sqrt(v / (u L)))     L: tokens that a row may gain; u, v: mean and
                                                                     variance of those of a round; m(B): mean of the
                                                                     largest of B normal values: the slowest row ends
                                                                     the call. Few are counted one by one
    "off"                       T(b), as often as a round of the target alone has steps

A plan that no round was captured of costs the seconds of capturing it, less those that not having it has cost so far:
it is captured when it is worth it, as skis are bought when as much went to renting them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from .controller import Choice, Controller
from .estimates import MOST, reach
from .forecast import TARGET, Expectations, Forecast, along
from .plans import LENGTHS, Drafting, Plan, Situation
from .rounds.chain import bucket_of
from .rounds.program import MOST_PASSES, UNROLLED
from .search import Search

_REPLAY_SECONDS = 6e-5  # of a round beside its passes: the report is read, the next round is launched
_LOOKUP_SECONDS = 1e-5  # of a level without a model, for all rows
_FEW_ROUNDS = 4.0  # of "off", from here down the last round of a row counts as a whole one,
_NEARLY = 0.25  # unless only so much of it is needed
_COUNTED = np.arange(1.0, 13.0)  # rounds of other plans that are counted one by one
_LENGTHS = np.array(LENGTHS, float)
_LARGEST = np.array([0.0, 0.56, 1.03, 1.42, 1.77, 2.07, 2.34])  # of 1, 2, 4 ... 64 standard normal values, the mean
_CAPTURING_SHARE = 0.03  # of all seconds may go to capturing rounds that show whether another plan is better
_FIRST_CAPTURING = 0.05  # seconds, as long as nothing is remembered of a chain
_WORTH_CAPTURING = 0.02  # what a plan must gain over the best that can run to be missed


class FixedExpectations(Expectations):
    """Forecasts of rounds that do the same work whatever is accepted."""

    def of_limits(self, plan: Plan, limits: Sequence[int], odds: Sequence[float], slots: float) -> Forecast[float]:
        """All rows draft as much as the plan says."""
        return self.of(plan, len(limits), len(limits), slots)

    def _off(self, batch: int, slots: float) -> Forecast[float]:
        seconds = UNROLLED * float(self.target.of(float(bucket_of(batch)), slots)) + _REPLAY_SECONDS
        (factor,) = self.memory.factors((), [0], batch, hopeful=True) if self.corrected else [1.0]
        return Forecast(float(UNROLLED * batch), seconds * factor, seconds)

    def _grid(self, active: tuple[int, ...], batch: int, drafting: int, slots: float, odds: float) -> Forecast:
        rows = bucket_of(batch)
        most, length, drafts, passes = self._drafts(active, rows, slots)
        axes = drafts.ndim
        tokens = batch * (1.0 + _kept(self._reach(active[0]), length))
        seconds = drafts + self.target.of(rows * (most + 1.0), slots) + _REPLAY_SECONDS
        corrected = seconds * along(self._corrections(active, batch), axes)
        # However slow rounds of "off" were: a check of more tokens takes no less, and the draft comes on top.
        corrected = np.maximum(corrected, self.off(batch, slots).seconds / UNROLLED + drafts)
        corrected = np.where(passes + 1 > MOST_PASSES, np.inf, corrected)
        return Forecast(np.broadcast_to(tokens, seconds.shape), corrected, seconds)

    def rounds(self, active: tuple[int, ...], batch: int, slots: float, left: float, room: float) -> np.ndarray:
        """Rounds by all plans of these levels until every row has gained `left` tokens of the `room` that it may."""
        length, chances = self._drafts(active, bucket_of(batch), slots)[1], self._reach(active[0])
        mean = 1.0 + _kept(chances, length)
        squares = 1.0 + _kept([(2 * i + 3) * chance for i, chance in enumerate(chances)], length)
        variance = np.maximum(squares - mean**2, 1e-6)
        largest = np.interp(np.log2(batch), np.arange(len(_LARGEST)), _LARGEST)
        many = left / mean * (1.0 + largest * np.sqrt(variance / (mean * room)))
        if many.min() > _COUNTED[-1] / 2:
            return many
        behind = _COUNTED * mean[..., None] - (left - 0.5)
        done = _below(behind / np.sqrt(_COUNTED * variance[..., None]))
        wanted = math.ceil(left) - 1  # of a draft, where the first round is to be the last
        done[..., 0] = np.where(length >= wanted, [1.0, *chances][wanted], 0.0) if wanted <= MOST else 0.0
        return np.where(many > _COUNTED[-1] / 2, many, 1.0 + (1.0 - done**batch).sum(-1))

    def _reach(self, top: int) -> list[float]:
        """Per position the chance that the target keeps all up to it."""
        pair = self.memory.pair(self.levels, top, TARGET)
        return self._once(("reach", top), lambda: reach(pair.chances(self._doubt(top, TARGET))))

    def _drafts(self, active: tuple[int, ...], rows: int, slots: float) -> tuple[np.ndarray, ...]:
        """`_fixed`, for the target."""
        return self._once(("drafts", active, rows, slots), lambda: self._fixed(active, 1, rows, slots))

    def _fixed(
        self, active: Sequence[int], depth: int, rows: int, slots: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Grids for the drafts of active[0], `depth` levels below the target: the tokens that are handed up at most
        and that are expected, seconds, and forward passes."""
        index, *below = active
        if self.levels[index].costs is None:
            return _LENGTHS, _LENGTHS, np.full_like(_LENGTHS, _LOOKUP_SECONDS), np.zeros_like(_LENGTHS)
        costs, lead = self.levels[index].costs, depth + 1.0 if self.levels[index].own_cache else 1.0
        if not below:
            seconds = costs.of(rows * lead, slots) + (_LENGTHS - 1.0) * costs.of(float(rows), slots)
            return _LENGTHS, _LENGTHS, seconds, _LENGTHS
        most, length, drafts, passes = self._fixed(below, depth + 1, rows, slots)
        axes = 1 + most.ndim
        chances = self.memory.pair(self.levels, below[0], index).chances(self._doubt(below[0], index))
        rounds = np.ceil(along(_LENGTHS, axes) / (most + 1.0))
        check = costs.of(rows * (most + lead), slots)
        expected = rounds * (1.0 + _kept(reach(chances), length))
        return rounds * (most + 1.0), expected, rounds * (drafts + check), rounds * (passes + 1.0)

    def _doubt(self, proposer: int, checker: int) -> float:
        return self.doubts * self.memory.pair(self.levels, proposer, checker).doubt if self.doubts else 0.0


class Captures(Protocol):
    """Which plans can be launched for how many rows, and what the others take first."""

    def ready(self, rows: int) -> list[Plan]:
        """Plans with a captured round."""

    def seconds(self, plan: Plan, rows: int) -> float:
        """Seconds of capturing a round; 0 where there is one."""


class Captured:
    """`Captures` where a round of every plan has been captured."""

    def ready(self, rows: int) -> list[Plan]:
        """None: no plan has to wait for a capture, so none is preferred."""
        return []

    def seconds(self, plan: Plan, rows: int) -> float:
        """Nothing."""
        return 0.0


class FixedSearch(Search):
    """Plans compared by the rounds that the longest row needs, and what capturing them takes.

    credit: seconds that were lost so far for want of a plan of these levels. best_if_ready: the plan that would be
    best if rounds of all were captured.
    """

    def __init__(self, *given, captures: Captures, credit: Mapping[tuple[int, ...], float]):
        super().__init__(*given)
        self.captures, self.credit = captures, credit
        self._longest, self._room = max(self.left()), max(self.situation.rooms) + 1.0
        self._ready = captures.ready(self.batch)
        self.best_if_ready, self._least = self.off, super().time(self.off)

    def lengths(self, active: tuple[int, ...], drafting: Drafting | None = None) -> tuple[Plan, float]:
        """The best lengths: those that would be if all were captured, or some that are."""
        times = self._times(active, drafting)
        place = int(times.argmin())
        best = self._plan(active, place)
        if times.flat[place] < self._least * (1.0 - _WORTH_CAPTURING):
            self.best_if_ready, self._least = best, float(times.flat[place])
        found = [best, *(plan for plan in self._ready if plan.active == active and plan != best)]
        each = [(plan, float(times[self._at(plan)]) + self._rest(plan)) for plan in found]
        return min(each, key=lambda one: one[1])

    def time(self, plan: Plan, drafting: Drafting | None = None) -> float:
        """The time of one plan, what is left of capturing it included."""
        return super().time(plan, drafting) + self._rest(plan)

    def to_prepare(self, plan: Plan) -> float:
        """Seconds of capturing a round of the plan."""
        return self.captures.seconds(plan, self.batch)

    def _rest(self, plan: Plan) -> float:
        return max(self.to_prepare(plan) - self.credit.get(plan.active, 0.0), 0.0)

    def _off_time(self) -> float:
        round_ = self.known.off(self.batch, self.situation.slots)
        rounds = self._longest * self.batch / round_.tokens
        rounds = rounds if rounds > _FEW_ROUNDS else max(math.ceil(rounds - _NEARLY), 1)
        return rounds * round_.seconds

    def _times(self, active: tuple[int, ...], drafting: Drafting | None) -> np.ndarray:
        drafting = drafting or Drafting.all_of(self.batch)
        grid = self.known.grid(active, self.batch, self.batch, self.situation.slots)
        rounds = self.known.rounds(active, self.batch, self.situation.slots, self._longest, self._room)
        return self.to_read(active, drafting) + rounds * grid.seconds

    def _groups(self, top: int) -> list[Drafting]:
        """A row that drafts nothing would be padding, and cost as much."""
        return [Drafting.all_of(self.batch)]


class FixedController(Controller):
    """A controller of captured rounds. captures: what can be launched."""

    CHOOSING, FIRST_CHOOSING = 0.1, 0.25  # more than on the host: it chooses while the device is at a round
    FIRST_OFF, LONGEST_OFF = 1, 8
    OFF_TRIAL = 1
    TRIAL = 4  # the levels of one have read the rows then
    WAITING = 0.01  # of the time, for what is left of a choice when the device has ended the round
    LONGEST_WAITING = 128  # rounds until a plan is questioned, however short they are
    WAITING_AFTER_ALL = 0.05  # of the time, where rounds bring less than expected

    def __init__(self, *given, captures: Captures, **options):
        super().__init__(*given, **options)
        self.captures = captures
        if not self._remembers:
            self.memory.capturing = _FIRST_CAPTURING
        self._wish: tuple[tuple[int, ...], float] | None = None  # levels, seconds lost a token for want of a plan
        self._settled = 0  # rounds until the plan may be questioned because they bring less than expected
        self.waiting: set[int] = set()  # levels that may pay, and have no captured round yet

    def _rounds_for(self, seconds: float, plan: Plan) -> int:
        waited = max(seconds / self.forecast.seconds - 1.0, 0.0)  # in rounds: by the device, for the choice
        self._settled = min(int(waited / self.WAITING_AFTER_ALL), self.LONGEST_WAITING)
        return max(super()._rounds_for(seconds, plan), min(int(waited / self.WAITING), self.LONGEST_WAITING))

    def _surprised(self) -> None:
        if self._settled <= 0:
            super()._surprised()

    def _affordable(self, search: Search, plan: Plan, usual: float) -> bool:
        affordable = super()._affordable(search, plan, usual)
        if not affordable and search.to_prepare(plan):
            self._wait_for(plan)
        return affordable

    def observe(self, limits: list[int], drafted: list[int], accepted: list[int], seconds: float, usual: bool = True,
                choice: Choice | None = None) -> None:
        """As `Controller.observe`; what is lost for want of a captured round is added up."""
        self._settled -= 1
        super().observe(limits, drafted, accepted, seconds, usual, choice)
        self.memory.capturing += _CAPTURING_SHARE * seconds
        if self._wish is not None:
            active, lost = self._wish
            credit = self.memory.credit
            credit[active] = credit.get(active, 0.0) + lost * (len(accepted) + sum(accepted))

    def _search(self, situation: Situation, doubts: float) -> FixedSearch:
        known = FixedExpectations(self.target, self.levels, self.memory, doubts=doubts, corrected=self.by_clock)
        return FixedSearch(situation, known, self.rows, captures=self.captures, credit=self.memory.credit)

    def _spend(self, search: FixedSearch, best: Plan, drafting: Drafting, trial: Plan | None) -> None:
        """Capturing is paid for, and what is lost for want of another plan will be credit for that."""
        wished, self._wish = search.best_if_ready, None
        if trial is not None:
            self.memory.capturing -= search.to_prepare(trial)
            self.memory.spare -= search.to_read(trial.active, self._few(search.batch))  # rounds are timed without it
        elif seconds := search.to_prepare(best):
            self.memory.credit[best.active] = max(self.memory.credit.get(best.active, 0.0) - seconds, 0.0)
        if wished != best and search.to_prepare(wished):
            have, want = (search.usual(plan, drafting).speed for plan in (best, wished))
            self._wish = (wished.active, 1.0 / have - 1.0 / want) if want > have else None
            self._wait_for(wished)

    def _wait_for(self, plan: Plan) -> None:
        """Its levels may pay once a round of it is captured."""
        own, _ = plan.split() if self.seen else (plan, False)
        self.waiting.update(own.active)

    def _shared(self, search: Search, plan: Plan, drafting: Drafting) -> list[int]:
        return [plan.most] * search.batch

    def _few(self, batch: int) -> Drafting:
        return Drafting.all_of(batch)


def _below(values: np.ndarray) -> np.ndarray:
    """The chance that a standard normal value is less, to .0002 (Bowling et al. 2009)."""
    return 1.0 / (1.0 + np.exp(np.clip(-values * (1.5976 + 0.070565992 * values**2), -80.0, 80.0)))


def _kept(chances: Sequence[float], length: np.ndarray) -> np.ndarray:
    """Tokens that are kept of a draft of this length, which may lie between two whole ones. chances: per position
    that all up to it are kept."""
    return np.interp(length, np.arange(len(chances) + 1), np.append(0.0, np.cumsum(chances)))
