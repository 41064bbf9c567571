"""How does a controller's plan reach the levels of a chain, and what a round did the controller?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...engines.engine import Engine
from ...nn.state import say_once
from ..controller import Controller, Situation
from ..draft import Drafter, Rows
from ..drafters.checked import CheckedDrafter
from ..drafters.cross_tokenizer import CrossTokenizerDrafter
from ..plans import Plan
from ..stats import PlanStats, SpeculationStats

_LATE = 4  # tokens a row may lack for a round to count as one like all others


class Steering:
    """A controller at work on a chain.

    make: the controller, asked for when there are rows. levels: the outermost drafter of each, from the one below the
    target down; runners: their engines, None for lookups. target: the target's engine.
    """

    controller: Controller

    def __init__(
        self,
        make: Callable[[], Controller],
        levels: Sequence[Drafter],
        runners: Sequence[Engine | None],
        target: Engine,
    ):
        self.make, self.target = make, target
        self.levels, self.runners = list(levels), list(runners)
        self.names = [level.name for level in levels]
        self._checked = [_checked(level) for level in levels]
        self._proved: set[int] = set()  # levels that have drafted without an error
        self._usual = self._made = False
        self._told: Plan | None = None

    def start(self, rows: int) -> None:
        """Forget the rows; so many follow."""
        if self._made:
            self.controller.start(rows)

    def select(self, keep: list[int]) -> None:
        """Go on with these rows."""
        if self._made:
            self.controller.select(keep)

    def admit(self, count: int) -> None:
        """So many rows join."""
        if self._made:
            self.controller.admit(count)

    def replace(self, row: int) -> None:
        """Another row takes the place of one that ended."""
        if self._made:
            self.controller.replace(row)

    def limits(self, rows: Rows, rooms: list[int]) -> list[int]:
        """Per row the tokens to draft in the coming round; the levels are set to draft them. rooms: tokens that a
        draft of each row may hold."""
        if not self._made:
            self._begin(len(rows))
        if self.controller.stay(len(rows)):
            return [min(limit, room) for limit, room in zip(self.controller.limits, rooms, strict=True)]
        missing = [_missing(runner, rows) for runner in self.runners]
        slots = sum(map(len, rows)) / len(rows)
        plan = self.controller.choose(Situation(rooms, slots, missing))
        self._set(plan)
        unread = max(missing[index] for index in plan.active) if plan.active else 0
        prompt = _missing(self.target, rows)
        self._usual = max(unread, prompt) <= _LATE * len(rows) and any(rooms)
        return [min(limit, room) for limit, room in zip(self.controller.limits, rooms, strict=True)]

    def observe(
        self, stats: SpeculationStats, limits: list[int], drafted: list[int], accepted: list[int], seconds: float
    ) -> None:
        """What the round did, and how long it took."""
        controller = self.controller
        forecast, plan, tokens = controller.forecast, controller.plan, len(accepted) + sum(accepted)
        self._proved.update(plan.active)
        controller.observe(limits, drafted, accepted, seconds if self._usual else None)
        if plan != self._told:
            self._told, words = plan, plan.told(self.names)
            self._counts = stats.plans.setdefault(words, PlanStats())
        told = self._counts
        told.rounds += 1
        if self._usual:
            told.timed += 1
            told.tokens += tokens
            told.seconds += seconds
            told.expected_tokens += forecast.tokens
            told.expected_seconds += forecast.seconds
            told.off_seconds += tokens / controller.off_speed
        self._usual = True  # unless what comes next is new

    def fail(self, error: Exception) -> None:
        """A level raised. One that drafted before is given up, with one warning: the target goes on alone; the error
        of one that never did is the caller's."""
        if not set(self.controller.plan.active) <= self._proved:
            raise error
        plan = self.controller.plan.told(self.names)
        say_once(self.target.model, f"levels failed while drafting ({plan}), the target goes on alone: {error!r}")
        self.controller.fail()

    def _begin(self, rows: int) -> None:
        self.controller, self._made = self.make(), True
        self.controller.start(rows)
        for index, judge in enumerate(self._checked):
            if judge is not None:
                judge.on_check = partial(self.controller.observe_inner, index)

    def _set(self, plan: Plan) -> None:
        for index, judge in enumerate(self._checked):
            if judge is not None:
                judge.left_out = not plan.lengths[index]
                judge.num_draft_tokens = next(filter(None, plan.lengths[index + 1 :]), 0)


def _checked(level: Drafter) -> CheckedDrafter | None:
    inside = level.inner if isinstance(level, CrossTokenizerDrafter) else level
    return inside if isinstance(inside, CheckedDrafter) else None


def _missing(runner: Engine | None, rows: Rows) -> int:
    """Tokens of all rows that are in no slot of an engine's cache."""
    if runner is None or runner.follow is not None:
        return 0
    held = (min(len(row), have) for row, have in zip(rows, runner.lengths, strict=False))  # rows may be new to it
    return sum(map(len, rows)) - sum(held)
