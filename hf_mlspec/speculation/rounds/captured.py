"""How does a round run where it is one replay? Launch, wait, and read what the device reports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...engines.memory import out_of_memory
from ...engines.rows import up_to_growth
from ...nn.state import say_once
from ..checker import Checker, Verdict, nan_error
from ..draft import Drafter, Rows
from ..plans import Situation
from ..stats import SpeculationStats
from ..traces.recorder import checkers
from .beginning import Beginnings, put
from .caches import adopt, disown, drafters
from .chain import CapturedChain, bucket_of
from .plan import too_long
from .planning import Observed, Planning
from .program import NOT_CHECKED, RoundProgram
from .reading import Reading, by_length
from .report import tell, tell_steps, told
from .rounds import NoRoom
from .state import Noise
from .steps import Steps


class CapturedRounds:
    """Rounds of a borrowed chain; the host waits once for each. See `Rounds`.

    planning: chooses the program of every round of a chain that is planned; None: all are the chain's own.
    bucket: rows that a round is launched for. places: of every row its line in the chain's state, below the bucket.
    noise: how the row of a number samples. script: int32 ``[levels - 1, rows, rounds, 2]``: (drafted, accepted) of
    every check to come for the rows that start, of the target first, given instead of found; the chain was made for as
    many script_rounds. Rows that join later have none: nothing is drafted for them.
    Seconds of levels cannot be told apart inside a graph: target_seconds of the stats is the device's time for whole
    rounds, those of levels are 0.
    """

    def __init__(
        self,
        chain: CapturedChain,
        target: Checker,
        drafter: Drafter | None,
        *,
        script: torch.Tensor | None = None,
        planning: Planning | None = None,
    ):
        self.chain, self.target, self.drafter, self.script = chain, target, drafter, script
        self.planning, self.program = planning, chain.program  # of the round that was launched last
        # Of a call; a stream says itself how its rows sample.
        self.noise = partial(Noise, target.sampler.seed or 0) if chain.program.sampled else lambda _: Noise()
        self.checkers, self.drafters = checkers(target, drafter), drafters(drafter)
        self.bucket, self.places, self.drafted, self.drafted_by = 0, [], [], None
        self._ends: list[int] = []
        self._rooms: list[int] = []  # tokens that each row may gain
        self._gained = 0  # by the row that gained most in the last round
        # Per row what a round reported that ended before the loop asked for it; None: the row was not part of it.
        self._reported: list[list[int] | None] | None = None
        self._first = True
        self._direct = False  # whether the round under way was launched right behind another
        self.reading, self.steps = Reading(chain, self.drafters), Steps(chain)
        self._observed: Observed | None = None
        self.begun: Beginnings = {}

    def start(self, rows: Rows, ends: list[int], numbers: list[int], cached: int) -> None:
        """Prefill the target's cache with all but the last token of every row; see `Rounds.start`."""
        self.bucket = bucket_of(len(rows))
        self._seconds_before = self.chain.graphs.seconds
        self.chain.state.clear()
        for drafter in self.drafters:
            drafter.stats.reset()
        self._ends, self._rooms = list(ends), [end - len(row) for row, end in zip(rows, ends, strict=True)]
        self.reading.start(len(rows))
        self.places = by_length(rows, list(range(len(rows))))
        held = self._join(rows, ends, numbers, self.places, [cached] * len(rows))
        self._give(numbers, range(len(rows)), held)
        if self.planning is not None:
            self.planning.start(len(rows))
        if self.script is not None:
            levels, _, rounds, _ = self.script.shape
            table = self.chain.state.script
            table[:levels, self.places, :rounds] = self.script.to(table)

    def refusal(self, end: int) -> str:
        """A captured level drafts for every row, or there is another chain."""
        return next(filter(None, (too_long(drafter, end) for drafter in self.drafters)), "")

    def admit(self, rows: Rows, ends: list[int], numbers: list[int]) -> None:
        """Prefill these rows in free places, behind the round under way."""
        self._end_round()
        self._make_room_for(len(self.places) + len(rows), max(map(len, rows), default=0))
        taken = set(self.places)
        free = [place for place in range(self.bucket) if place not in taken]
        places = by_length(rows, free)
        held = self._join(rows, ends, numbers, places, [0] * len(rows))
        self.places += places
        self._ends += ends
        self._rooms += [end - len(row) for row, end in zip(rows, ends, strict=True)]
        self.reading.admit(len(rows))
        self._give(numbers, range(len(self.places) - len(rows), len(self.places)), held)
        if self._reported is not None:
            self._reported += [None] * len(rows)
        if self._planned:
            self.planning.admit(len(rows))

    def replace(self, places: list[int], rows: Rows, ends: list[int], numbers: list[int], common: list[int]) -> None:
        """Prefill rows in the places of others; the target keeps what they have in common (invariant 3)."""
        self._end_round()
        self._make_room_for(len(self.places), max(map(len, rows)))
        kept = self.reading.kept(places, common, rows)
        held = self._join(rows, ends, numbers, [self.places[r] for r in places], kept)
        for r, row, end in zip(places, rows, ends, strict=True):
            self._ends[r], self._rooms[r] = end, end - len(row)
            self.reading.replace(r)
            if self._reported is not None:
                self._reported[r] = None
            if self._planned:
                self.planning.replace(r)
        self._give(numbers, places, held)

    def _give(self, numbers: list[int], rows: Sequence[int], held: list[int]) -> None:
        """Levels get what was read of rows that join; held: what the target has."""
        for number, r, have in zip(numbers, rows, held, strict=True):
            self.reading.give(self.begun, number, r, self.places[r], have)

    def select(self, keep: list[int]) -> None:
        """Go on with these rows; where half of the places would be idle, rows move to the first ones."""
        self._end_round()
        lines = self.places, self._ends, self._rooms
        self.places, self._ends, self._rooms = ([line[r] for r in keep] for line in lines)
        self.reading.select(keep)
        if self._reported is not None:
            self._reported = [self._reported[r] for r in keep]
        bucket = bucket_of(len(keep))
        if keep and bucket < self.bucket and self._worth_moving(bucket):
            self._gather(bucket)
        self._let_go_on()
        if self._planned:
            self.planning.select(keep)

    def run(self, rows: Rows, stats: SpeculationStats) -> Verdict:
        """Replay, unless a round is under way, and wait for it."""
        if self._reported is None:
            if not self.chain.graphs.batch:
                self._make_room(rows)
                self._launch(rows)
            if self._planned:
                self.planning.think(partial(self._situation, rows), len(rows))
            self.steps.waits()
            self._end_round()
        apart = [0] + [NOT_CHECKED] * (self.program.fields - 1)
        report = [line or apart for line in self._reported]
        self._reported = None
        self._refuse_nan(report)
        return self._verdict(rows, report, stats)

    def commit(self, rows: Rows, gained: list[int], going: list[int], stats: SpeculationStats) -> None:
        """The device works on while the host streams what was accepted."""
        alone, direct = not self.program.active, self._direct  # of the round that ended
        self._rooms = [end - len(row) for row, end in zip(rows, self._ends, strict=True)]
        self._gained = max(gained, default=0)
        if len(going) == len(rows) and not self._lacks_room(rows) and self._is_ready(rows):
            self._launch(rows, behind=True)
        if alone:
            tell_steps(self.checkers[0], gained, stats)
        if self._observed is not None:
            self.planning.observe(stats, self._observed, direct)
            self._observed = None

    def account(self, stats: SpeculationStats) -> None:
        """The first round is prefill, too."""
        stats.target_seconds = self.chain.graphs.seconds - self._seconds_before
        stats.capture_seconds = self.chain.graphs.capture_seconds - self.chain.captured_before
        if self._first:
            stats.prefilled(stats.seconds, stats.target_seconds)
            self._first = False

    def _end_round(self) -> None:
        """Wait for the round under way, if one is; `run` takes its report."""
        if self.chain.graphs.batch:
            lines = self.chain.graphs.wait()
            self.steps.ended(self.program)
            self._reported = [lines[place] for place in self.places]

    def _launch(self, rows: Rows, behind: bool = False) -> None:
        """Start a round of these rows. behind: right behind another one."""
        program, capture = self._chosen(rows), None if behind else self._captured
        self.program, late = self.reading.opened(program, rows, self.places, self.bucket, capture)
        self._direct = behind and not late and self.chain.graphs.has(self.program, self.bucket)
        self.chain.graphs.launch(self.program, self.bucket)
        self.steps.launched()
        self.reading.launched(self.program, rows, self._end)

    def _is_ready(self, rows: Rows) -> bool:
        """Whether the coming round has a graph. To capture one waits until the tokens of the last round are told."""
        program = self.chain.program
        if self._planned:
            program = self.planning.program(partial(self._situation, rows), len(rows))
        program = self.steps.wanted(program, self._left(rows), len(rows))
        return self.chain.graphs.has(program, self.bucket)

    def _chosen(self, rows: Rows) -> RoundProgram:
        """What the coming round runs, captured. Where there is no memory for that, the target alone goes on."""
        own = self.chain.program
        if not self._planned:
            return self._in_steps(own, rows)
        program = self.planning.program(partial(self._situation, rows), len(rows))
        if not self._captured(program, self.bucket):
            self.planning.give_up()
            wanted = self.bucket
            self.bucket = self.chain.graphs.least_rows(own, wanted)
            if not self.bucket:
                raise NoRoom(f"no memory to capture rounds of {wanted} rows")
            program = own
        self.planning.launched()
        return self._in_steps(program, rows)

    def _in_steps(self, program: RoundProgram, rows: Rows) -> RoundProgram:
        """The program, or where that is better a single step, captured."""
        return self.steps.chosen(program, self._left(rows), len(rows), self.bucket, self._captured)

    def _left(self, rows: Rows) -> int:
        return max(end - len(row) for row, end in zip(rows, self._ends, strict=True))

    @property
    def _planned(self) -> bool:
        return self.planning is not None and not self.planning.failed

    def _situation(self, rows: Rows) -> Situation:
        """What a plan is chosen for."""
        lengths = list(map(len, rows))
        self.planning.graphs.bucket = self.bucket
        rooms = [max(end - n - 1, 0) for end, n in zip(self._ends, lengths, strict=True)]
        return Situation(rooms, sum(lengths) / len(rows), self.reading.missing(lengths, self.program))

    def _join(
        self, rows: Rows, ends: list[int], numbers: list[int], places: list[int], cached: list[int]
    ) -> list[int]:  # fmt: skip
        """Load rows into their places, where the target's cache holds `cached` tokens; -> those it holds now."""
        if not rows:
            return []
        until = [min(end, self.chain.slots) for end in ends]
        self.chain.state.load(places, rows, until, list(map(self.noise, numbers)))
        have = zip(numbers, places, cached, strict=True)
        held = [put(self.begun, self.target.runner, number, place, count) for number, place, count in have]
        self.target.runner.settled = [None] * len(self.places)  # rounds move states, and the host does not see it
        beside = [numbers[r] in self.begun and count == len(rows[r]) - 1 for r, count in enumerate(held)]
        self.steps.join(len(rows), any(beside))
        return held

    def _end(self, r: int) -> int:
        """The length row r may reach in the chain as it is now."""
        return min(self._ends[r], self.chain.slots)

    def _lacks_room(self, rows: Rows) -> bool:
        return any(len(row) >= self.chain.slots < end for row, end in zip(rows, self._ends, strict=True))

    def _make_room(self, rows: Rows) -> None:
        """Where a row has filled its slots and may go on, all rows get more; NoRoom where there is no memory."""
        if self._lacks_room(rows):
            self._grow(self.chain.batch, self.chain.more_slots(max(self._ends)))

    def _make_room_for(self, rows: int, longest: int) -> None:
        """Have a place for each of so many rows, and slots for one of this length; NoRoom where there is no memory."""
        self.bucket = max(self.bucket, bucket_of(rows))
        batch, slots = max(self.chain.batch, self.bucket), self.chain.slots
        self._grow(batch, slots if longest < slots else up_to_growth(longest + 1))

    def _grow(self, batch: int, slots: int) -> None:
        """Have that many places and slots, and a graph for the bucket."""
        grows = (batch, slots) != (self.chain.batch, self.chain.slots)
        try:
            if grows:
                disown(self.target, self.drafter)
                self.chain.grow(batch, slots)
            self.chain.graphs.capture(self.chain.program, self.bucket)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise NoRoom(
                f"no memory for {slots} tokens in each of {batch} rows ({str(error).splitlines()[0]})"
            ) from error
        if grows:
            self.reading.interrupt()  # nothing was drafted for a row that had filled its slots
            adopt(self.chain, self.target, self.drafter, len(self.places))
            self._let_go_on()

    def _let_go_on(self) -> None:
        self.chain.state.let_go_on(self.places, [self._end(r) for r in range(len(self.places))])

    def _captured(self, program: RoundProgram, bucket: int) -> bool:
        """Whether there is a graph for so many rows; where there is no memory for one, another goes on."""
        try:
            self.chain.graphs.capture(program, bucket)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            told = {self.chain.program: "graphs of more rows are used", self.chain.single: "whole rounds are run"}
            used = "prompts are read before" if program.lead > 1 else told.get(program, "the target goes on alone")
            say_once(self.target.runner.model, f"rounds of {bucket} rows are not captured, not enough memory: {used}")
            return False
        return True

    def _worth_moving(self, bucket: int) -> bool:
        """Whether there are rounds of fewer places, or it is worth capturing them."""
        if not self._planned:
            return self._captured(self.chain.program, bucket)
        return self.planning.graphs.worth_capturing(self.program, bucket, max(self._rooms) / max(self._gained, 1))

    def _gather(self, bucket: int) -> None:
        places = sorted(self.places)
        self.chain.move(places)
        self.places = [places.index(place) for place in self.places]
        self.bucket = bucket

    def _refuse_nan(self, report: list[list[int]]) -> None:
        level = max((line[0] for line in report), default=0)
        if level:
            found = self.program.levels[level - 1]
            raise nan_error(found.name, found.decoder.dtype)

    def _verdict(self, rows: Rows, lines: list[list[int]], stats: SpeculationStats) -> Verdict:
        """What the target accepted of every row, every check counted and told on the way."""
        program, self.drafted = self.program, [0] * len(rows)
        rooms = [max(self._end(r) - len(row) - 1, 0) for r, row in enumerate(rows)]
        report, asked, accepted, inner = told(program, lines, rooms), self.drafted, self.drafted, []
        self.drafted_by = self.drafters[program.active[0]].name if program.active else None
        for check in report.checks:
            found = check.asked, check.drafted, check.accepted
            if check.checker < 0:
                asked, self.drafted, accepted = found
            else:
                inner += [(check.checker, *line) for line in zip(*found, strict=True) if line[0]]
            if any(check.alive):
                if check.checker < 0:
                    stats.count_pass(sum(check.alive))
                self.drafters[check.drafter].stats.settle(check.drafted, check.accepted)
                tell(self.checkers[check.checker + 1], check.drafted, check.accepted, check.alive)
        for place, index in enumerate(program.active, start=1):
            self.drafters[index].stats.rounds += program.drafts(place)
            self.drafters[index].stats.forwards += program.forwards(place)
        if self._planned and program.lead == 1:  # one that reads says nothing of others
            took = self.chain.graphs.round_seconds, self.planning.own_idle(self.chain.graphs.idle), program.steps
            gained = [len(line) - 1 for line in report.tokens]
            self._observed = Observed(self.planning.running, self.bucket, asked, self.drafted, gained, inner, *took)
        return Verdict(report.tokens, accepted, None, None)
