"""Which other plan is worth a few rounds to find out about, and what may that take?"""

from __future__ import annotations

from collections.abc import Callable

from .costs import PassCosts
from .memory import LevelCosts, Memory
from .plans import Drafting, Plan, Situation
from .search import Choice, Search
from .untold import TRIAL_SHARE, Learner

_AHEAD = 256  # tokens that a row may still gain, for which trials may spend in advance where nothing is remembered
_LEAST_TRIAL = 0.05  # of a round that a trial takes at least
_ROWS_OF_A_TRIAL = 8  # one row in so many takes part, or all, where that loses no more than _LEARNED times as much
_OF_A_CALL = 0.03  # of the rest of a call may go to capturing a round for what costs forbid
_LEARNED, _SAVED, _SAVED_FOR = 1.5, 3.0, 64  # calls of so many tokens have so many times what one may lose, saved up


class Trials(Learner):
    """What a controller tries beside the plan that it thinks best.

    A level may be better than its chances say, as few of its drafts were checked; or its passes cheaper than measured,
    as something else ran then. For the first one a round tells what is kept. For the second a round is timed, the one
    behind the first, which finds cold caches; only of levels of which none ever was, and where nothing else waits.
    """

    OFF_TRIAL = 4  # rounds of a trial of "off", which is about its seconds
    TRIAL = 1  # rounds of one of another plan
    TIMED_TRIAL = 2  # of one that is about its seconds
    FIRST_TIMES = 2  # rounds of "off" before anything else, as costs may have been measured beside a load; 0: none

    target: PassCosts
    by_clock: bool
    choice: Choice

    def __init__(self, memory: Memory, levels: list[LevelCosts], remembers: bool):
        super().__init__(memory, levels)
        self._remembers, self._granted, self.to_build = remembers, False, 0.0
        self._joined, self._chosen, self._took = 0, 0, 0.0  # rows since the last choice; choices; seconds of the last
        self._trying = Drafting(())  # the rows that draft in a trial
        self._of_costs = False  # the trial is about them
        self.on_disproved: Callable[[], None] = _nothing  # a trial has shown that costs are too high

    def _grant(self, situation: Situation, off_speed: float) -> None:
        """Seconds for trials where rows have joined: in advance, or what earlier calls left, a few times that."""
        if not any(situation.rooms):  # they wait for the prompt to be read
            return
        batch = len(situation.rooms)
        ahead = sum(min(room, _AHEAD) for room in situation.rooms) / batch
        seconds = TRIAL_SHARE * self._joined * ahead / off_speed
        if not self._remembers:
            self.memory.spare += seconds
        elif not self._granted:
            saved = _SAVED if ahead >= _SAVED_FOR else 1.0
            self.memory.spare = min(self.memory.spare, saved * seconds)
        self._joined, self._granted = 0, True

    @property
    def _known(self) -> tuple[PassCosts, list[LevelCosts], Memory]:
        return self.target, self.levels, self.memory

    def _how(self, may_try: bool) -> dict:
        """Options of `Expectations`."""
        may_try = may_try and self.memory.spare >= _LEAST_TRIAL * self.choice.forecast.seconds
        return {"corrected": self.by_clock, "doubts": (0.0, 1.0) if may_try else (0.0,)}

    def _worth_a_trial(self, search: Search, best: Plan, drafting: Drafting, margin: float) -> Plan | None:
        """Another plan that would be better if its levels were as good as they may well be, where a round of it costs
        no more than may be spent on finding out."""
        usual, self._of_costs = search.usual(best, drafting), False
        if best.active and self._is_off_unknown(search):
            return search.off
        if not any(search.situation.rooms) or self.memory.spare < _LEAST_TRIAL * usual.seconds:
            return None
        hoped, least = search.hoped(), search.time(best, drafting) * (1.0 - margin)
        better = hoped.better(least, best.active)
        if best.active and (alone := hoped.time(hoped.off)) < least:
            better.append((hoped.off, alone))
        better.sort(key=lambda one: one[1])
        found = [plan for plan, _ in better] or [search.longer(best)]
        trial = next((plan for plan in found if plan and self._affordable(search, plan, usual.speed)), None)
        return trial if trial or better or not self.by_clock else self._of_high_costs(search, usual.speed)

    def _of_high_costs(self, search: Search, speed: float) -> Plan | None:
        """The shortest draft of a level that costs forbid, if nobody has seen what its rounds take, and those may be
        lost. They are timed with all rows, as costs of many tokens are wrong as often as those of few."""
        most = min(self.memory.capturing, _OF_A_CALL * search.time(search.off))
        for plan in search.too_dear(speed):
            all_, rounds = Drafting.all_of(search.batch), max(self.TRIAL, self.TIMED_TRIAL)
            lost = rounds * search.lost(plan, all_, speed) + 2 * self._took + self.to_build
            if lost <= self.memory.spare and search.to_prepare(plan) <= most:
                self._trying, self._of_costs = all_, True
                return plan
        return None

    def _rounds_of(self, trial: Plan) -> int:
        if not trial.active:
            return self.OFF_TRIAL if self.memory.knows_off else self.FIRST_TIMES
        return max(self.TRIAL, self.TIMED_TRIAL) if self._of_costs else self.TRIAL

    def _is_off_unknown(self, search: Search) -> bool:
        """Whether "off", with which plans are compared, is to be timed first: it never was, and rows go on."""
        known = not self.by_clock or self.memory.knows_off
        return not known and 0 < self.FIRST_TIMES < max(search.situation.rooms) / 2

    def _affordable(self, search: Search, plan: Plan, usual: float) -> bool:
        """Whether a trial of `plan`, reading and building included, costs what may be spent. usual: the best speed."""
        (few, least), (all_, most) = [(one, search.lost(plan, one, usual)) for one in self._who_tries(search.batch)]
        self._trying, lost = (all_, most) if most <= max(_LEARNED * least, 0.0) else (few, least)
        lost += 2 * self._took + (self.to_build if plan.active else 0.0)  # there is a choice behind it, too
        return lost <= self.memory.spare and search.to_prepare(plan) <= self.memory.capturing

    def _who_tries(self, batch: int) -> list[Drafting]:
        """The rows that may draft in a trial: a few, others each time, or all, of which most is learned."""
        few = -(-batch // _ROWS_OF_A_TRIAL)
        return [Drafting(tuple((self._chosen + i) % batch for i in range(few))), Drafting.all_of(batch)]


def _nothing() -> None:
    pass
