"""How does a controller's plan reach the levels of a chain, and what a round did the controller?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...engines.engine import Engine
from ...nn.state import say_once
from ...ops.attention import FIRST_SLOTS
from ..controller import Controller
from ..draft import Drafter, Rows
from ..drafters.checked import CheckedDrafter
from ..drafters.cross_tokenizer import CrossTokenizerDrafter
from ..plans import Plan, Situation
from ..stats import SpeculationStats

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
        self._read: list[list[int]] = []  # per level the tokens of every row that it has read, in the target's tokens
        self._lengths: list[int] = []  # of the rows when the round began
        self.failed = False
        self._usual = self._made = False
        self._resting = False  # the last round was of "off", as the coming ones are until there is another choice:
        self._rested = (0, 0.0)  # how many the controller was not told of, and their seconds
        self._told: Plan | None = None

    def start(self, rows: int) -> None:
        """Forget the rows; so many follow."""
        if self._made:
            self.settle()
            self._read = [[0] * rows for _ in self.levels]
            self.controller.start(rows)

    def select(self, keep: list[int]) -> None:
        """Go on with these rows."""
        if self._made:
            self.settle()
            self._read = [[line[r] for r in keep] for line in self._read]
            self.controller.select(keep)

    def admit(self, count: int) -> None:
        """So many rows join."""
        if self._made:
            self.settle()
            self._read = [line + [0] * count for line in self._read]
            self.controller.admit(count)

    def replace(self, row: int) -> None:
        """Another row takes the place of one that ended."""
        if self._made:
            self.settle()
            for line in self._read:
                line[row] = 0
            self.controller.replace(row)

    def limits(self, rows: Rows, rooms: list[int]) -> list[int]:
        """Per row the tokens to draft in the coming round; the levels are set to draft them. rooms: tokens that a
        row may gain still, but the one that every round adds."""
        if self.failed:
            return [0] * len(rows)
        if not self._made:
            self._begin(len(rows))
        controller = self.controller
        stays = controller.stay(len(rows))
        if stays and self._resting:
            return [0] * len(rows)
        self.settle()
        self._lengths = list(map(len, rows))
        if not stays:
            missing = [self._missing(index) for index in range(len(self.levels))]
            told = missing * 2 if controller.seen else missing
            controller.choose(Situation(rooms, sum(self._lengths) / len(rows), told))
            plan = self._set()
            drafting = [r for r, limit in enumerate(controller.limits) if limit]
            unread = max((missing[index][r] for index in plan.active for r in drafting), default=0)
            self._usual = max(unread, self._unread(rows)) <= _LATE and any(rooms)
        return [min(limit, room) for limit, room in zip(controller.limits, rooms, strict=True)]

    def observe(
        self, stats: SpeculationStats, limits: list[int], drafted: list[int], accepted: list[int], seconds: float
    ) -> None:
        """What the round did, and how long it took."""
        if self.failed:
            return
        controller = self.controller
        forecast, tokens = controller.forecast, len(accepted) + sum(accepted)
        if self._resting:
            self._rest(tokens, seconds)
            return
        plan, windowed = self._plan()
        if any(drafted):
            self._proved.update(plan.active)
        for index in plan.active:
            lines = zip(self._lengths, limits, self._read[index], strict=True)
            self._read[index] = [n if limit else have for n, limit, have in lines]
        controller.observe(limits, drafted, accepted, seconds, self._usual)
        if controller.plan != self._told:
            told = plan.told(self.names, controller.seen if windowed else 0)
            self._told, self._counts = controller.plan, stats.of_plan(told)
        if self._usual:
            off = tokens / controller.off_speed
            self._counts.count(tokens, seconds, forecast.tokens, forecast.seconds, off)
        else:
            self._counts.rounds += 1
        self._resting = self._usual and not plan.active and not controller.choice.trial
        self._usual = True  # unless what comes next is new

    def settle(self) -> None:
        """Tell the controller of rounds of "off" that it was not told of: all at once, as each takes as little as a
        twentieth of a small model's pass."""
        rounds, seconds = self._rested
        self._resting, self._rested = False, (0, 0.0)
        if rounds:
            self.controller.observe_off(rounds, seconds)

    def _rest(self, tokens: int, seconds: float) -> None:
        """Count a round of "off"; the controller is told later, of a clock that jumps as of a factor of two."""
        controller, forecast = self.controller, self.controller.forecast
        self._counts.count(tokens, seconds, forecast.tokens, forecast.seconds, tokens / controller.off_speed)
        rounds, before = self._rested
        self._rested = rounds + 1, before + min(max(seconds, 0.5 * forecast.seconds), 2.0 * forecast.seconds)

    def fail(self, error: Exception) -> None:
        """A level raised. One that drafted before is given up, with one warning: the target goes on alone; the error
        of one that never did is the caller's."""
        plan, _ = self._plan()
        if not set(plan.active) <= self._proved:
            raise error
        told = plan.told(self.names)
        say_once(self.target.model, f"levels failed while drafting ({told}), the target goes on alone: {error!r}")
        self.failed = True

    def _begin(self, rows: int) -> None:
        self.controller, self._made = self.make(), True
        self.start(rows)
        for index, judge in enumerate(self._checked):
            if judge is not None:
                judge.on_check = partial(self._observe_inner, index)

    def _observe_inner(self, index: int, limit: int, drafted: int, accepted: int) -> None:
        """One row of a check by a level."""
        behind = len(self.levels) if self._plan()[1] else 0  # where its twin stands
        self.controller.observe_inner(index + behind, limit, drafted, accepted)

    def _plan(self) -> tuple[Plan, bool]:
        """Of the levels, and whether they have the draft window."""
        plan = self.controller.plan
        return plan.split() if self.controller.seen else (plan, False)

    def _set(self) -> Plan:
        """Let the levels draft as the controller has chosen."""
        plan, windowed = self._plan()
        if self.controller.seen:
            for runner in filter(None, self.runners):
                runner.draft_window = self.controller.seen - FIRST_SLOTS if windowed and runner.can.draft_window else 0
        for index, judge in enumerate(self._checked):
            if judge is not None:
                judge.left_out = not plan.lengths[index]
                judge.num_draft_tokens = next(filter(None, plan.lengths[index + 1 :]), 0)
        return plan

    def _missing(self, index: int) -> list[int]:
        """Per row the tokens that a level would have to read before it drafts."""
        runner = self.runners[index]
        if runner is None or runner.follow is not None:
            return [0] * len(self._lengths)
        most = getattr(inside(self.levels[index]), "max_positions", None) or max(self._lengths)
        return [min(n - have, most) for n, have in zip(self._lengths, self._read[index], strict=True)]

    def _unread(self, rows: Rows) -> int:
        """The most tokens of a row that the target has not read."""
        held = self.target.lengths  # of rows that are new it may know nothing
        return max(len(row) - (held[r] if r < len(held) else 0) for r, row in enumerate(rows))


def inside(level: Drafter) -> Drafter:
    """What drafts in a level's own vocabulary."""
    return level.inner if isinstance(level, CrossTokenizerDrafter) else level


def _checked(level: Drafter) -> CheckedDrafter | None:
    drafter = inside(level)
    return drafter if isinstance(drafter, CheckedDrafter) else None
