"""Which plan is best where a round does the same work whatever is accepted, as when it is replayed on a GPU?

What a round brings and costs is in fixed_rounds.py. A plan that no round was captured of costs the seconds of
capturing it, less those that not having it has cost so far: it is captured when it is worth it, as skis are bought
when as much went to renting them. Some of them the rest of the call must gain in any case, or the last rounds of calls
would capture plans that fit them a little better; only levels of which nothing is captured yet may be tried without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from .controller import Controller
from .fixed_rounds import FixedExpectations, passes_of
from .plans import Drafting, Plan, Situation
from .search import Choice, Search

_FEW_ROUNDS = 4.0  # of "off", from here down the last round of a row counts as a whole one,
_NEARLY = 0.25  # unless only so much of it is needed
_CAPTURING_SHARE = 0.03  # of all seconds may go to capturing rounds that show whether another plan is better
_FIRST_CAPTURING = 0.05  # seconds, as long as nothing is remembered of a chain
_REST = 0.3  # of the seconds of capturing is what the rest of a call must gain, whatever was lost before
_WORTH_CAPTURING = 0.02  # what a plan must gain over the best that can run to be missed


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
    best if rounds of all were captured; saves: the seconds that it would save of each token beside "off".
    """

    def __init__(self, *given, captures: Captures, credit: Mapping[tuple[int, ...], float], **options):
        super().__init__(*given, **options)
        self.captures, self.credit = captures, credit
        self._longest, self._room = max(self.left()), max(self.situation.rooms) + 1.0
        self._ready: list[Plan] | None = None
        self.best_if_ready, self.saves = self.off, 0.0

    def best(self, margin: float) -> tuple[Plan, Drafting]:
        """The plan of least time, be it captured or worth it. margin: what a plan must gain over "off"."""
        best, captured = self.off, super().time(self.off)
        alone, self.best_if_ready = captured, self.off
        if any(self.situation.rooms):
            least = self.time(self.off) * (1.0 - margin)
            for active in self._faster(max(least, captured)):
                fastest = self._best_of(active)
                time = float(self._times()[fastest])
                if time < captured * (1.0 - _WORTH_CAPTURING):
                    self.best_if_ready, captured = self.cells.plan_at(fastest), time
                if time < least:
                    plan, time = self.lengths(active)
                    best, least = (plan, time) if time < least else (best, least)
        self.saves = (alone - captured) / sum(self.left())
        return best, self._all

    def lengths(self, active: tuple[int, ...]) -> tuple[Plan, float]:
        """The best lengths: those that would be if all were captured, or some that are."""
        times, best = self._times(), self.cells.plan_at(self._best_of(active))
        found = [best, *(plan for plan in self._captured() if plan.active == active and plan != best)]
        each = [(plan, float(times[self.cells.place_of(plan)]) + self._rest(plan)) for plan in found]
        return min(each, key=lambda one: one[1])

    def time(self, plan: Plan, drafting: Drafting | None = None) -> float:
        """The time of one plan, what is left of capturing it included."""
        return super().time(plan, drafting) + self._rest(plan)

    def to_prepare(self, plan: Plan) -> float:
        """Seconds of capturing a round of the plan."""
        return self.captures.seconds(plan, self.batch)

    def _rest(self, plan: Plan) -> float:
        seconds = self.to_prepare(plan)
        least = 0.0 if self.doubts and not self._is_known(plan.active) else _REST
        return max(seconds - self.credit.get(plan.active, 0.0), least * seconds)

    def _is_known(self, active: tuple[int, ...]) -> bool:
        """Whether any plan of these levels is captured."""
        return any(plan.active == active for plan in self._captured())

    def _captured(self) -> list[Plan]:
        if self._ready is None:
            self._ready = self.captures.ready(self.batch)
        return self._ready

    def _off_time(self) -> float:
        round_ = self.known.off(self.batch, self.situation.slots)
        rounds = self._longest * self.batch / round_.tokens
        rounds = rounds if rounds > _FEW_ROUNDS else max(math.ceil(rounds - _NEARLY), 1)
        return rounds * round_.seconds

    def _rounds(self, drafting: int | None = None, odds: tuple[float, ...] = ()) -> np.ndarray:
        slots, known = self.situation.slots, self.known
        found = known.all_of(self.cells, self.batch, self.batch, slots, doubts=self.doubts)
        rounds = known.rounds(self.cells, self.batch, self._longest, self._room, self.doubts)
        return rounds * found.seconds


class FixedController(Controller):
    """A controller of captured rounds. captures: what can be launched."""

    CHOOSING, FIRST_CHOOSING = 0.1, 0.25  # more than on the host: it chooses while the device is at a round
    FIRST_OFF, LONGEST_OFF = 1, 8
    OFF_TRIAL = 1
    PAID, LONGEST_PAID = 0.0, 0  # the device is at a round
    FIRST_TIMES = 0  # the device runs nothing else
    TRIAL = 4  # the levels of one have read the rows then
    WAITING = 0.01  # of the time, for what is left of a choice when the device has ended the round
    LONGEST_WAITING = 128  # rounds until a plan is questioned, however short they are
    WAITING_AFTER_ALL = 0.05  # of the time, where rounds bring less than expected

    def __init__(self, *given, captures: Captures, **options):
        super().__init__(*given, **options)
        self.captures, self._passes = captures, passes_of(self.target, tuple(self.levels))
        if not self._remembers:
            self.memory.capturing = _FIRST_CAPTURING
        self._wish: tuple[tuple[int, ...], float] | None = None  # levels, seconds lost a token for want of a plan
        self._hoped: FixedSearch | None = None  # where "off" is chosen and no trial can be paid
        self._settled = 0  # rounds until the plan may be questioned because they bring less than expected
        self.waiting: set[int] = set()  # levels that may pay, and have no captured round yet

    def _rounds_for(self, seconds: float, plan: Plan) -> int:
        waited = max(seconds / self.forecast.seconds - 1.0, 0.0)  # in rounds: by the device, for the choice
        self._settled = min(int(waited / self.WAITING_AFTER_ALL), self.LONGEST_WAITING)
        return max(super()._rounds_for(seconds, plan), min(int(waited / self.WAITING), self.LONGEST_WAITING))

    def _surprised(self) -> None:
        if self._settled <= 0:
            super()._surprised()

    def _worth_a_trial(self, search: FixedSearch, best: Plan, drafting: Drafting, margin: float) -> Plan | None:
        found, self._hoped = super()._worth_a_trial(search, best, drafting, margin), None
        if found is None and not best.active and self._how(may_try=True)["doubts"] != (0.0,):
            self._hoped = search.hoped()
            self._hoped.best(margin)
        return found

    def _affordable(self, search: Search, plan: Plan, usual: float) -> bool:
        worth = not search.to_prepare(plan) or search.hoped().time(plan) < sum(search.left()) / usual
        affordable = worth and super()._affordable(search, plan, usual)
        if not affordable and search.to_prepare(plan):
            self._wait_for(plan)
        return affordable

    def observe(self, limits: list[int], drafted: list[int], accepted: list[int], seconds: float, usual: bool = True,
                choice: Choice | None = None) -> None:
        """As `Controller.observe`; what is lost for want of a captured round is added up."""
        self._settled -= 1
        super().observe(limits, drafted, accepted, seconds, usual, choice)
        self._memory.capturing += _CAPTURING_SHARE * seconds  # rounds that wait change nothing of it, nor of credit
        if self._wish is not None:
            active, lost = self._wish
            credit = self._memory.credit
            credit[active] = credit.get(active, 0.0) + lost * (len(accepted) + sum(accepted))

    def _search(self, situation: Situation, may_try: bool = False) -> FixedSearch:
        known = FixedExpectations(*self._known, **self._how(may_try), passes=self._passes)
        how = {"captures": self.captures, "credit": self.memory.credit}
        return FixedSearch(situation, known, self.rows, self._cells(situation), **how)

    def _spend(self, search: FixedSearch, best: Plan, drafting: Drafting, trial: Plan | None) -> None:
        """Capturing is paid for, and what is lost for want of another plan will be credit for that."""
        wished, self._wish = search.best_if_ready, None
        if trial is not None:
            self.memory.capturing -= search.to_prepare(trial)
            self.memory.spare -= search.to_read(trial.active, self._trying)  # rounds are timed without it
        elif seconds := search.to_prepare(best):
            self.memory.credit[best.active] = max(self.memory.credit.get(best.active, 0.0) - seconds, 0.0)
        if wished != best and search.to_prepare(wished):
            have, want = (search.usual(plan, drafting).speed for plan in (best, wished))
            self._wish = (wished.active, 1.0 / have - 1.0 / want) if want > have else None
            self._wait_for(wished)
        elif self._hoped is not None and search.to_prepare(self._hoped.best_if_ready):
            self._wish = self._hoped.best_if_ready.active, self._hoped.saves
            self._wait_for(self._hoped.best_if_ready)

    def _wait_for(self, plan: Plan) -> None:
        """Its levels may pay once a round of it is captured."""
        own, _ = plan.split() if self.seen else (plan, False)
        self.waiting.update(own.active)

    def _shared(self, search: Search, plan: Plan, drafting: Drafting) -> list[int]:
        return [plan.most] * search.batch

    def _who_tries(self, batch: int) -> list[Drafting]:
        return [Drafting.all_of(batch)] * 2
