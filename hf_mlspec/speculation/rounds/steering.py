"""How does a controller's plan reach the levels of a chain, and what a round did the controller?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

from ...engines.engine import Engine
from ...nn.state import say_once
from ...ops.attention_plain import FIRST_SLOTS
from ..controller import Controller
from ..deferred import Deferred, Kind, inside
from ..draft import Drafter, Rows
from ..drafters.checked import CheckedDrafter
from ..openings import Openings, alike
from ..plans import Plan, Situation
from ..search import Choice
from ..stats import SpeculationStats

_CHOOSING = 0.05  # of the time of the rounds before the first choice of a call that began without one;
_MOST_ROUNDS = 64  # so many rounds at most, or times more where one choice after another found the same levels best
_NO_REST = (0, 0, 0.0, 0.0)
_LATE = 4  # tokens a row may lack for a round to count as one like all others


class Steering:
    """A controller at work on a chain.

    make: the controller, asked for when there is something to choose. levels: the outermost drafter of each, from the
    one below the target down; runners: their engines, None for lookups. target: the target's engine. seen: slots that
    a draft window leaves in view, and plans have every level twice (`plans.Choices`); 0: there is none. openings: what
    calls begin with, None: they choose. deferred: the levels, where they are built when a plan first uses them;
    on_built is then told of them.

    A call like an earlier one begins with what that chose, until its rounds have taken so long that choosing takes
    little beside them, or bring less than expected; what they did, the controller is told when it is made.
    """

    def __init__(
        self,
        make: Callable[[], Controller],
        levels: Sequence[Drafter],
        runners: Sequence[Engine | None],
        target: Engine,
        seen: int = 0,
        openings: Openings | None = None,
        deferred: Deferred | None = None,
    ):
        self.make, self.target, self.seen, self.openings = make, target, seen, openings
        self.deferred, self.on_built = deferred, lambda built: None
        self._have(levels, runners)
        self.names = [level.name for level in levels] if deferred is None else deferred.names
        self._kinds = list(map(Kind.of, levels, runners)) if deferred is None else deferred.kinds
        self._proved: set[int] = set()  # levels that have drafted without an error
        self._read: list[list[int]] = []  # per level the tokens of every row that it has read, in the target's tokens
        self._lengths: list[int] = []  # of the rows when the round began
        self.controller: Controller | None = None
        self.failed = self._usual = False
        self._doubts = False  # what the call began with brings less than expected, and was not chosen again
        self._resting = False  # the last round was of "off", as the coming ones are until there is another choice:
        self._rested = _NO_REST  # how many were not told of yet, their tokens and seconds, and those within limits
        self._off_seconds = 0.0  # expected of each
        self._told: Plan | None = None
        self._like: tuple | None = None  # what the call has in common with others that begin as it does
        self._first: Choice | None = None  # what it began with, and for how many rounds more:
        self._rounds = 0
        self._early: list[Callable[[Controller], None]] = []  # what a controller is to be told
        self._lost = self._making = 0.0  # seconds: of early rounds, beyond those expected; of making the controller

    @property
    def choice(self) -> Choice | None:
        """For the round under way; None before the first one."""
        return self._first if self.controller is None else self.controller.choice

    @property
    def active(self) -> tuple[int, ...]:
        """The levels that draft in the round under way."""
        return () if self.choice is None else self._plan()[0].active

    def start(self, rows: int) -> None:
        """Forget the rows; so many follow."""
        self.settle()
        self._read = [[0] * rows for _ in self.names]
        if self.controller is not None:
            self.controller.start(rows)

    def select(self, keep: list[int]) -> None:
        """Go on with these rows."""
        if self._changes():
            self.controller.select(keep)
        self._read = [[line[r] for r in keep] for line in self._read]

    def admit(self, count: int) -> None:
        """So many rows join."""
        if self._changes():
            self.controller.admit(count)
        self._read = [line + [0] * count for line in self._read]

    def replace(self, row: int) -> None:
        """Another row takes the place of one that ended."""
        if self._changes():
            self.controller.replace(row)
        for line in self._read:
            line[row] = 0

    def holds(self, engine: Engine, row: int, tokens: int) -> None:
        """An engine has read so many tokens of a row that just joined."""
        if self._read and engine in self.runners:
            self._read[self.runners.index(engine)][row] = tokens

    def limits(self, rows: Rows, rooms: list[int]) -> list[int]:
        """Per row the tokens to draft in the coming round; the levels are set to draft them. rooms: tokens that a
        row may gain still, but the one that every round adds."""
        if self.failed or self._waits(rooms):
            return [0] * len(rows)
        stays = self._opens(rows, rooms) or self._made(len(rows)).stay(len(rows))
        if stays and self._resting:
            return [0] * len(rows)
        self.settle()
        self._lengths = list(map(len, rows))
        if not stays:
            self._choose(rows, rooms)
        return [min(limit, room) for limit, room in zip(self.choice.limits, rooms, strict=True)]

    def observe(
        self, stats: SpeculationStats, limits: list[int], drafted: list[int], accepted: list[int], seconds: float
    ) -> None:
        """What the round did, and how long it took."""
        if self.failed:
            return
        if self._resting:
            self._rest(len(accepted) + sum(accepted), seconds)
            return
        if self.choice is None:  # there was nothing to choose
            stats.of_plan("off").rounds += 1
            return
        choice, tokens = self.choice, len(accepted) + sum(accepted)
        plan, windowed = self._plan()
        if any(drafted):
            self._proved.update(plan.active)
        for index in plan.active:
            lines = zip(self._lengths, limits, self._read[index], strict=True)
            self._read[index] = [n if limit else have for n, limit, have in lines]
        usual, forecast = self._usual, choice.forecast
        self._tell(lambda controller: controller.observe(limits, drafted, accepted, seconds, usual, choice))
        if choice.plan != self._told:
            told = plan.told(self.names, self.seen if windowed else 0)
            self._told, self._counts = choice.plan, stats.of_plan(told)
        if usual and forecast.may_take(seconds):
            off = tokens / choice.off_speed
            self._counts.count(tokens, seconds, forecast.tokens, forecast.seconds, off)
            self._question(choice, tokens, seconds)
        else:
            self._counts.rounds += 1
        self._resting, self._off_seconds = usual and not plan.active and not choice.trial, forecast.seconds
        self._usual = True  # unless what comes next is new

    def end(self) -> None:
        """The call ends: let memory know of its rounds, or where it made no controller the next one's."""
        self.settle()
        if self._doubts:
            self.openings.doubt(self._like)
        if self.controller is not None:
            self.controller.settle()
        elif self._first is not None and self._early:
            self.openings.untold, self._early = (self._first, self._early), []

    def settle(self) -> None:
        """Count rounds of "off", and tell the controller of them: all at once, as each takes as little as a twentieth
        of a small model's pass."""
        rounds, tokens, seconds, limited = self._rested
        self._resting, self._rested = False, _NO_REST
        if rounds:
            choice = self.choice
            expected = rounds * choice.forecast.tokens, rounds * choice.forecast.seconds
            self._counts.count(tokens, seconds, *expected, tokens / choice.off_speed, rounds)
            self._tell(lambda controller: controller.observe_off(rounds, limited))

    def _rest(self, tokens: int, seconds: float) -> None:
        """One more round of "off"; the controller will be told of a clock that jumps as of a factor of two."""
        rounds, before, taken, limited = self._rested
        usual = self._off_seconds
        if not self.choice.forecast.may_take(seconds):
            self.settle()
            self._counts.rounds += 1
            self._tell(lambda controller: controller.observe_off(1, usual))
            self._resting = True
            return
        limited += min(max(seconds, 0.5 * usual), 2.0 * usual)
        self._rested = rounds + 1, before + tokens, taken + seconds, limited

    def fail(self, error: Exception) -> None:
        """A level raised. One that drafted before is given up, with one warning: the target goes on alone; the error
        of one that never did is the caller's."""
        plan, _ = self._plan()
        if not set(plan.active) <= self._proved:
            raise error
        told = plan.told(self.names)
        say_once(self.target.model, f"levels failed while drafting ({told}), the target goes on alone: {error!r}")
        self.failed = True

    def _waits(self, rooms: list[int]) -> bool:
        """Whether nothing could be drafted yet, as the target first reads the prompts."""
        return self.controller is None and self._first is None and self.openings is not None and not any(rooms)

    def _opens(self, rows: Rows, rooms: list[int]) -> bool:
        """Whether the coming round is of the plan that the call began with."""
        if self.controller is not None or self.openings is None:
            return False
        if self._like is None:
            self._like = alike(list(map(len, rows)), rooms, self.seen)
            self._first = self.openings.begin(self._like)
            if self._first is not None:
                expected = self._first.forecast.seconds
                least = min(int(self.openings.choosing_seconds / (_CHOOSING * expected)), _MOST_ROUNDS)
                self._rounds = least * self.openings.patience(self._like)
                self._lengths = list(map(len, rows))
                self._usual = self._set() and max(self._unread_by(self._first, rows), self._unread(rows)) <= _LATE
        self._rounds -= 1
        return self._first is not None and self._rounds >= 0

    def _question(self, choice: Choice, tokens: int, seconds: float) -> None:
        """Whether what the call began with is to be chosen anew, as its rounds bring less than expected."""
        if self.controller is None and choice.plan.active:
            taken = min(max(seconds, 0.5 * choice.forecast.seconds), 2.0 * choice.forecast.seconds)
            self._lost = choice.forecast.lost(self._lost, tokens, taken)
            if choice.forecast.surprises(self._lost, self.openings.choosing_seconds):
                self._rounds, self._doubts = 0, True

    def _choose(self, rows: Rows, rooms: list[int]) -> None:
        """What the coming rounds are to be; the levels are set to draft so."""
        begin, controller = perf_counter(), self.controller
        missing = [self._missing(index) for index in range(len(self.names))]
        told = missing * 2 if self.seen else missing
        usual = self.openings.usual(self._like) if self._making and self.openings is not None else None
        situation = Situation(rooms, sum(self._lengths) / len(rows), told, usual)
        controller.choose(situation)
        if self._making and self._like is not None:  # the first choice of the call
            seconds = self._making + perf_counter() - begin
            if self._first is None:
                best = controller.best_of(situation) if controller.choice.trial else controller.choice
                self.openings.learn(self._like, replace(best, switched=False), seconds)
            elif not controller.choice.trial:
                self._doubts &= not self.openings.agree(self._like, controller.choice)
            self._making = 0.0
        there = self._set() and any(rooms)
        self._usual = there and max(self._unread_by(controller.choice, rows), self._unread(rows)) <= _LATE

    def _tell(self, what: Callable[[Controller], None]) -> None:
        if self.controller is None:
            self._early.append(what)
        else:
            what(self.controller)

    def _changes(self) -> bool:
        """Rows are about to change: the controller is there to be told, unless nothing was asked of it yet."""
        self.settle()
        if self._first is not None:
            self._made(len(self._read[0]))
        return self.controller is not None

    def _made(self, rows: int) -> Controller:
        """The controller of so many rows, told of what they did."""
        if self.controller is None:
            begin, first = perf_counter(), self._first
            self.settle()
            made = self.make()
            made.to_build = 0.0 if self.deferred is None else self.deferred.seconds
            if self.openings is not None:
                self.openings.tell(made)
            made.start(rows)
            if first is not None:
                made.choice = first
            for what in self._early:
                what(made)
            self._early.clear()
            self.controller, self._making = made, perf_counter() - begin - made.measuring
            self._watch()
        return self.controller

    def _have(self, levels: Sequence[Drafter], runners: Sequence[Engine | None]) -> None:
        self.levels, self.runners = list(levels), list(runners)
        self._checked = [_checked(level) for level in levels]

    def _watch(self) -> None:
        """Checks inside of rounds are told to the controller."""
        for index, judge in enumerate(self._checked):
            if judge is not None:
                judge.on_check = partial(self._observe_inner, index)

    def _build(self) -> None:
        """The levels come, as a plan uses them."""
        built, self.deferred = self.deferred.build(), None
        self._have(built.levels, built.runners)
        if self.controller is not None:
            self.controller.to_build = 0.0
            self._watch()
        self.on_built(built)

    def _observe_inner(self, index: int, limit: int, drafted: int, accepted: int) -> None:
        """One row of a check by a level."""
        behind, choice = len(self.names) if self._plan()[1] else 0, self.choice  # where its twin stands
        self._tell(lambda made: made.observe_inner(index + behind, limit, drafted, accepted, choice))

    def _plan(self) -> tuple[Plan, bool]:
        """Of the levels, and whether they have the draft window."""
        plan = self.choice.plan
        return plan.split() if self.seen else (plan, False)

    def _set(self) -> bool:
        """Let the levels draft as was chosen; False where they had to be built for it."""
        plan, windowed = self._plan()
        there = self.deferred is None or not plan.active
        if not there:
            self._build()
        if self.seen:
            for runner in filter(None, self.runners):
                runner.draft_window = self.seen - FIRST_SLOTS if windowed and runner.can.draft_window else 0
        for index, judge in enumerate(self._checked):
            if judge is not None:
                judge.left_out = not plan.lengths[index]
                judge.num_draft_tokens = next(filter(None, plan.lengths[index + 1 :]), 0)
        return there

    def _unread_by(self, choice: Choice, rows: Rows) -> int:
        """The most tokens of a row that a level lacks which is to draft for it."""
        active = self._plan()[0].active
        missing = [self._missing(index) for index in active]
        drafting = [r for r, limit in enumerate(choice.limits) if limit]
        return max((line[r] for line in missing for r in drafting), default=0)

    def _missing(self, index: int) -> list[int]:
        """Per row the tokens that a level would have to read before it drafts."""
        kind = self._kinds[index]
        if not kind.reads:
            return [0] * len(self._lengths)
        most = kind.positions or max(self._lengths)
        return [min(n - have, most) for n, have in zip(self._lengths, self._read[index], strict=True)]

    def _unread(self, rows: Rows) -> int:
        """The most tokens of a row that the target has not read."""
        held = self.target.lengths  # of rows that are new it may know nothing
        return max(len(row) - (held[r] if r < len(held) else 0) for r, row in enumerate(rows))


def _checked(level: Drafter) -> CheckedDrafter | None:
    drafter = inside(level)
    return drafter if isinstance(drafter, CheckedDrafter) else None
