"""Which program does the next captured round run, where a controller chooses while the device is at the last one?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..controller import Choice
from ..draft import Drafter
from ..fixed_shapes import Captures, FixedController
from ..plans import Plan, Situation
from ..stats import SpeculationStats
from .chain import CapturedChain, bucket_of
from .program import UNROLLED, RoundProgram

_IDLE = 5e-5  # seconds between two rounds, until one was launched right behind another


@dataclass
class Observed:
    """A round that has ended: whose it was, and row by row what was drafted for the target and accepted (-1: the row
    was not part of it). inner: the same of every row and check below the target, with the level that checked."""

    choice: Choice
    drafted: list[int]
    accepted: list[int]
    inner: list[tuple[int, int, int]] = field(default_factory=list)


class KeptGraphs:
    """The graphs of a chain, as a controller sees them."""

    def __init__(self, chain: CapturedChain):
        self.chain = chain

    def ready(self, rows: int) -> list[Plan]:
        """Plans with a captured round; see `Captures`."""
        return self.chain.captured_plans(bucket_of(rows))

    def seconds(self, plan: Plan, rows: int) -> float:
        """Seconds of capturing a round; see `Captures`."""
        graphs, program = self.chain.graphs, self.chain.program_of(plan)
        return 0.0 if graphs.has(program, bucket_of(rows)) else graphs.seconds_to_capture(program)


class Planning:
    """A controller at work on captured rounds.

    make: the controller, asked for when there are rows. levels: the outermost drafter of each, from the one below the
    target down. running: what was decided for the round that was launched last. failed: there was no memory for a
    graph, and nothing is chosen any more.
    """

    controller: FixedController

    def __init__(self, make: Callable[[Captures], FixedController], levels: Sequence[Drafter], chain: CapturedChain):
        self.make, self.chain = make, chain
        self.names = [level.name for level in levels]
        self.graphs = KeptGraphs(chain)
        self.failed = False
        self.running: Choice | None = None
        self._ahead = False  # whether the plan of the next round is chosen already
        self._idle = _IDLE

    def start(self, rows: int) -> None:
        """Forget the rows; so many follow."""
        self.controller, self._ahead = self.make(self.graphs), False
        self.controller.start(rows)

    def select(self, keep: list[int]) -> None:
        """Go on with these rows."""
        self._ahead = False
        self.controller.select(keep)

    def admit(self, count: int) -> None:
        """So many rows join."""
        self._ahead = False
        self.controller.admit(count)

    def replace(self, row: int) -> None:
        """Another row takes the place of one that ended."""
        self._ahead = False
        self.controller.replace(row)

    def think(self, situation: Callable[[], Situation], rows: int) -> None:
        """Choose what comes after the round under way, unless that is known."""
        if not self._ahead and rows:
            if not self.controller.stay(rows):
                self.controller.choose(situation())
            self._ahead = True

    def program(self, situation: Callable[[], Situation], rows: int) -> RoundProgram:
        """What the coming round is to run."""
        self.think(situation, rows)
        return self.chain.program_of(self.controller.plan)

    def launched(self) -> None:
        """The coming round has become the one under way."""
        self._ahead, self.running = False, self.controller.choice

    def give_up(self) -> None:
        """There is no memory to capture what was chosen: the target goes on alone."""
        self.failed = True

    def observe(self, stats: SpeculationStats, round_: Observed, direct: bool) -> None:
        """What a round did. direct: it was launched right behind another, so that the time between them is a round's
        own."""
        graphs, controller, choice = self.chain.graphs, self.controller, round_.choice
        self._idle = graphs.idle if direct else self._idle
        seconds = graphs.round_seconds + self._idle
        for checker, drafted, accepted in round_.inner:
            controller.observe_inner(checker, drafted, drafted, accepted, choice)
        off_speed = controller.off_speed
        controller.observe(round_.drafted, round_.drafted, round_.accepted, seconds, choice=choice)
        tokens = len(round_.accepted) + sum(round_.accepted)
        told = stats.of_plan(choice.plan.told(self.names))
        told.count(tokens, seconds, choice.forecast.tokens, choice.forecast.seconds, tokens / off_speed,
                   rounds=1 if choice.plan.active else UNROLLED)
