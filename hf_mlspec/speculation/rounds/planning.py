"""Which program does the next captured round run, where a controller chooses while the device is at the last one?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from ..draft import Drafter
from ..fixed_shapes import Captures, FixedController
from ..plans import Plan, Situation, worth_a_window
from ..search import Choice
from ..stats import SpeculationStats
from .chain import CapturedChain, bucket_of
from .program import UNROLLED, RoundProgram

_CHOOSING_SHARE = 0.2  # of the time of the rounds before the first choice of a call
_WAITING_SHARE = 0.02  # of the time of all rounds: the device may wait for first choices
_MOST_SAVED = 0.05  # seconds of it
_MOST_WAITED = 8  # rounds until the first choice, where the device may wait for it
_MOST_CALLS = 8  # without one
_WORTH_CAPTURING = 4.0  # times the seconds of capturing rounds of fewer rows: what they take with more
_MOST_UNTOLD = 32  # rounds of calls that made no controller, of which the next one learns: more than is remembered
_IDLE = 5e-5  # seconds between two rounds, until one was launched right behind another


@dataclass
class Observed:
    """A round that has ended: whose it was, for how many rows it was launched, and row by row what was asked of the
    level below the target, drafted and accepted (-1: the row was not part of it). inner: the same of every row and
    check below the target, behind the level that checked. seconds, idle: as of `RoundGraphs`. steps: of the
    target, where it was alone."""

    choice: Choice
    bucket: int
    asked: list[int]
    drafted: list[int]
    accepted: list[int]
    inner: list[tuple[int, int, int, int]]
    seconds: float
    idle: float
    steps: int


class KeptGraphs:
    """The graphs of a chain, as a controller sees them. bucket: rounds are launched for no fewer rows."""

    def __init__(self, chain: CapturedChain):
        self.chain, self.bucket = chain, 0

    def ready(self, rows: int) -> list[Plan]:
        """Plans with a captured round; see `Captures`."""
        return self.chain.captured_plans(self._launched_for(rows))

    def seconds(self, plan: Plan, rows: int) -> float:
        """Seconds of capturing a round; see `Captures`."""
        graphs, program = self.chain.graphs, self.chain.program_of(plan)
        return 0.0 if graphs.has(program, self._launched_for(rows)) else graphs.seconds_to_capture(program)

    def worth_capturing(self, program: RoundProgram, rows: int, rounds: float) -> bool:
        """Whether so many more rounds are to be launched for fewer rows: where they are captured, or the rounds take
        long enough, as the last one did."""
        graphs = self.chain.graphs
        rest = rounds * graphs.round_seconds
        return graphs.has(program, rows) or rest > _WORTH_CAPTURING * graphs.seconds_to_capture(program)

    def _launched_for(self, rows: int) -> int:
        return max(bucket_of(rows), self.bucket)


def ends_unquestioned(chain: CapturedChain | None, lengths: list[int], new_tokens: int) -> Choice | None:
    """The choice of "off" with which a call of rows of these lengths begins and ends, counted as one that did; None
    where there is none, or it would choose anew. chain: the rounds of earlier calls with its levels."""
    if chain is None or chain.dropped:
        return None
    like = _alike(len(lengths), new_tokens - 1, sum(lengths) / len(lengths), chain)
    first = chain.first_choices.get(like)
    calls, rounds = chain.unquestioned + 1, -(-new_tokens // UNROLLED)
    if first is None or first.plan.active:
        return None
    if _is_time(chain, first, calls, rounds) and not _stands(chain, like, first, calls, rounds):
        return None
    chain.unquestioned = calls
    return first


def _stands(chain: CapturedChain, like: tuple, first: Choice, calls: int, rounds: int) -> bool:
    """Whether "off" was chosen so often that a call need not ask again, beside which asking is not little: each time
    it is chosen once more, twice as many calls do not ask."""
    little = chain.choosing_seconds <= _WAITING_SHARE * rounds * first.forecast.seconds
    return not little and calls < min(2 ** chain.agreed.get(like, 0), _MOST_CALLS)


def _alike(rows: int, longest: int, slots: float, chain: CapturedChain) -> tuple:
    """What tells a call from others: its rows, and up to a factor of two the tokens that the longest may gain."""
    return rows, longest.bit_length(), worth_a_window(chain.seen, slots)


def _is_time(chain: CapturedChain, first: Choice, calls: int, rounds: int) -> bool:
    """Whether so many rounds of the first choice take so long that choosing takes little beside them, or this is the
    last of many calls that did not choose."""
    if calls >= _MOST_CALLS:
        return True
    round_ = first.forecast.seconds
    waits = min(chain.choosing_seconds / (_CHOOSING_SHARE * round_), _MOST_WAITED)
    return rounds > waits and chain.choosing_seconds - round_ <= chain.may_wait


class Planning:
    """A controller at work on captured rounds.

    make: the controller. levels: the outermost drafter of each, from the one below the target down. running: what was
    decided for the round that was launched last. failed: there was no memory for a graph, and nothing is chosen any
    more.

    The first rounds of a call are of the plan that was chosen in the last call like it, until it has chosen anew:
    while the device is at the first round, or where rounds are shorter than that takes, at a later one.
    """

    controller: FixedController | None

    def __init__(self, make: Callable[[Captures], FixedController], levels: Sequence[Drafter], chain: CapturedChain):
        self.make, self.chain, self.controller = make, chain, None
        self.names = [level.name for level in levels]
        self.graphs = KeptGraphs(chain)
        self.failed = False
        self.running: Choice | None = None
        self._ahead = False  # whether the plan of the next round is chosen already
        self._chose = self._waited = False  # since the last launch; the device may have waited for it
        self._rows, self._like = 0, None  # rows of the call, and what tells it from others
        self._early: list[tuple[Observed, float]] = []  # rounds, until there is a controller
        self._beginning: Situation | None = None  # of the call, until it has chosen
        self._first: Choice | None = None
        self._idle = _IDLE

    def start(self, rows: int) -> None:
        """Forget the rows; so many follow."""
        self._rows, self.controller, self._ahead, self._like, self._rounds = rows, None, False, None, 0
        self._early = []
        self._beginning = None
        self.chain.unquestioned += 1

    def select(self, keep: list[int]) -> None:
        """Go on with these rows."""
        self._ahead = False
        self._made().select(keep)

    def admit(self, count: int) -> None:
        """So many rows join."""
        self._ahead = False
        self._made().admit(count)

    def replace(self, row: int) -> None:
        """Another row takes the place of one that ended."""
        self._ahead = False
        self._made().replace(row)

    def think(self, situation: Callable[[], Situation], rows: int) -> None:
        """Choose what comes after the round under way, unless that is known."""
        if self._ahead or not rows:
            return
        self._ahead = True
        if self.controller is None and self._first is not None and not self._is_time():
            return
        begin, first, controller = perf_counter(), self.controller is None, self._made()
        stays = controller.stay(rows)
        if not stays:
            controller.choose(situation())
        self._chose |= first or not stays
        if first:
            self.chain.choosing_seconds = perf_counter() - begin
            self.chain.may_wait -= max(self.chain.choosing_seconds - controller.forecast.seconds, 0.0)

    def _is_time(self) -> bool:
        """Whether the rounds so far have taken so long that choosing takes little beside them, or many calls have
        ended before that."""
        self._rounds += 1
        return _is_time(self.chain, self._first, self.chain.unquestioned, self._rounds)

    def program(self, situation: Callable[[], Situation], rows: int) -> RoundProgram:
        """What the coming round is to run."""
        if self.controller is None and self._like is None:
            self._beginning = situation()
            longest = max(self._beginning.rooms, default=0)
            self._like = _alike(rows, longest, self._beginning.slots, self.chain)
            self._first = self.chain.first_choices.get(self._like)
        if self.controller is None and self._first is not None:
            return self.chain.program_of(self._first.plan)
        self.think(situation, rows)
        return self.chain.program_of(self.controller.plan)

    def launched(self) -> None:
        """The coming round has become the one under way."""
        self._waited, self._chose = self._chose, False
        self._ahead, self.running = False, self._first if self.controller is None else self.controller.choice

    def end(self) -> None:
        """The call has ended, or breaks off: let memory know of all rounds, or the next call's controller where this
        one made none."""
        if self.controller is not None:
            self.controller.settle()
        elif self._early:
            rounds = sum(len(early) for _, early in self.chain.untold)
            if rounds < _MOST_UNTOLD:
                self.chain.untold.append((self._rows, self._early[: _MOST_UNTOLD - rounds]))
            self._early = []

    def _learn_of_earlier(self) -> None:
        """Rounds of calls that made no controller."""
        for rows, early in self.chain.untold:
            self.controller.rows.start(rows)
            for round_, seconds in early:
                self._learn(round_, seconds)
        self.chain.untold = []

    def _made(self) -> FixedController:
        if self.controller is None:
            self.controller, self.chain.unquestioned = self.make(self.graphs), 0
            self._learn_of_earlier()
            self.controller.start(self._rows)
            if self._first is not None:
                self.controller.choice = self._first
            for round_, seconds in self._early:
                self._learn(round_, seconds)
            self._early.clear()
            if self._beginning is not None:  # while all rows of the call are there
                self._learn_first(self.controller.best_of(self._beginning))
                self._beginning = None
        return self.controller

    def _learn_first(self, choice: Choice) -> None:
        """What calls like this one are to begin with. "Off" that is found again stays what it was: calls without
        levels have told of it what they took."""
        agreed, before = self.chain.agreed, self.chain.first_choices.get(self._like)
        same = before is not None and before.plan.active == choice.plan.active
        agreed[self._like] = agreed.get(self._like, 0) + 1 if same else 0
        if not same or choice.plan.active:
            self.chain.first_choices[self._like] = choice

    def give_up(self) -> None:
        """There is no memory to capture what was chosen: the target goes on alone."""
        self.failed = True
        self.chain.first_choices.pop(self._like, None)
        if self.controller is not None:  # nothing can be said of them
            self.controller.waiting.update(range(len(self.names)))

    def observe(self, stats: SpeculationStats, round_: Observed, direct: bool) -> None:
        """What a round did. direct: it was launched right behind another, so that the time between them is a round's
        own."""
        choice = round_.choice
        self._idle = round_.idle if direct else self._idle
        seconds = round_.seconds + self._idle
        self.chain.may_wait = min(self.chain.may_wait + _WAITING_SHARE * seconds, _MOST_SAVED)
        tokens = len(round_.accepted) + sum(round_.accepted)
        plan, windowed = self.chain.split(choice.plan)
        told = stats.of_plan(plan.told(self.names, self.chain.seen if windowed else 0))
        share = 1.0 if choice.plan.active else round_.steps / UNROLLED
        told.count(tokens, seconds, share * choice.forecast.tokens, share * choice.forecast.seconds,
                   tokens / choice.off_speed, rounds=round_.steps)
        if share < 1:  # a round of a few steps says little of one of many
            return
        if self.controller is None:
            self._early.append((round_, seconds))
            if not choice.plan.active:
                choice.correct_off(tokens, seconds)
        else:
            self._learn(round_, seconds)

    def own_idle(self, idle: float) -> float:
        """Seconds without work in front of the round under way; where it waited for a choice, those of an earlier one.
        """
        return self._idle if self._waited else idle

    def _learn(self, round_: Observed, seconds: float) -> None:
        behind = len(self.names) if self.chain.split(round_.choice.plan)[1] else 0  # where twins of the levels stand
        for checker, *counts in round_.inner:
            self.controller.observe_inner(checker + behind, *counts, choice=round_.choice)
        usual = round_.bucket == bucket_of(len(round_.accepted))  # else it was launched for more rows than there are
        self.controller.observe(round_.asked, round_.drafted, round_.accepted, seconds, usual, round_.choice)
