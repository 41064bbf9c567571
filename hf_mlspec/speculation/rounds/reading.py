"""What have the own caches of a captured chain's levels read of each row, and how do they read the rest?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from ...engines.cuda.engine import prefill
from ..draft import Drafter, Rows
from .beginning import Beginnings, engine_of, put
from .first_rounds import Capture
from .program import RoundLevel, RoundProgram

if TYPE_CHECKING:
    from .chain import CapturedChain


class Reading:
    """The rows of captured rounds, as their levels know them.

    A round feeds a level the few tokens that the round before has added. A level that was not part of that round, or
    at another depth, first reads what it lacks. The target reads what it lacks of rows that joined when their first
    round begins, or that round does (first_rounds.py).
    """

    def __init__(self, chain: CapturedChain, drafters: Sequence[Drafter]):
        self.chain, self.drafters = chain, drafters
        self._held: list[list[int]] = [[] for _ in drafters]  # per level the tokens of each row that it surely holds
        self._last: list[tuple[int, ...] | None] = []  # per row the levels of the round that it was part of last
        self._joined: dict[int, int] = {}  # tokens that the target's cache holds of rows without a round so far

    def start(self, rows: int) -> None:
        """Forget the rows; so many follow."""
        self._held, self._last, self._joined = [[0] * rows for _ in self.drafters], [None] * rows, {}

    def admit(self, count: int) -> None:
        """So many rows join."""
        self._last += [None] * count
        for line in self._held:
            line += [0] * count

    def replace(self, r: int) -> None:
        """Another row takes the place of row r."""
        self._last[r] = None
        for line in self._held:
            line[r] = 0

    def give(self, begun: Beginnings, number: int, r: int, place: int, held: int) -> None:
        """Row r, which just joined, has what levels read of it before. held: tokens that the target's cache has."""
        self._joined[r] = held
        for index, drafter in enumerate(self.drafters if number in begun else ()):
            if index + 1 < len(self.chain.levels) and getattr(self.chain.levels[index + 1], "own_cache", False):
                self._held[index][r] = put(begun, engine_of(drafter), number, place)

    def kept(self, places: Sequence[int], common: Sequence[int], rows: Rows) -> list[int]:
        """How many tokens stay in the target's cache of rows that have so many in common with those in these places
        before; where layers keep states, none."""
        if self.chain.levels[0].states is not None:
            return [0] * len(rows)
        held = [self._joined.get(r, same) for r, same in zip(places, common, strict=True)]  # others have all of it
        return [max(min(have, same - 1, len(row) - 1), 0) for have, same, row in zip(held, common, rows, strict=True)]

    def select(self, keep: list[int]) -> None:
        """Go on with these rows."""
        self._last = [self._last[r] for r in keep]
        self._held = [[line[r] for r in keep] for line in self._held]
        self._joined = {place: self._joined[r] for place, r in enumerate(keep) if r in self._joined}

    def interrupt(self) -> None:
        """Rows may have been part of a round in which nothing was drafted for them."""
        self._last = [None] * len(self._last)

    def missing(self, lengths: list[int], program: RoundProgram) -> list[list[int]]:
        """Per level that plans have the tokens of each row that it would have to read; program: of the round under
        way."""
        nothing = [0] * len(lengths)
        found = [
            [n - have for n, have in zip(lengths, self._held[index], strict=True)]
            if level.own_cache and index not in program.active else nothing
            for index, level in enumerate(self.chain.levels[1:])
        ]  # fmt: skip
        return found * 2 if self.chain.seen else found

    def opened(
        self, program: RoundProgram, rows: Rows, places: Sequence[int], bucket: int, capture: Capture | None
    ) -> tuple[RoundProgram, bool]:  # fmt: skip
        """Let levels read what the coming round does not feed them, or one run that feeds it; -> what runs, and if any
        read. capture: makes a graph of a program, and says whether it could; None: nobody may wait for it."""
        joined, self._joined = sorted(self._joined.items(), key=lambda one: places[one[0]]), {}
        lacking, chain = max((len(rows[r]) - held for r, held in joined), default=1), self.chain
        if not joined or (lacking == 1 and chain.levels[0].states is None):  # a state is forgotten by reading
            return program, self.catch_up(program, rows, places)
        first_rounds = chain.first_rounds
        first = None if first_rounds is None else first_rounds.program(program, lacking, bucket)
        if first is not None and chain.graphs.has(first, bucket):
            return first, False
        lines, held, begin = [rows[r][:-1] for r, _ in joined], [held for _, held in joined], perf_counter()
        chain.read(chain.levels[0], [places[r] for r, _ in joined], lines, held)
        if first is not None and capture is not None:
            took = perf_counter() - begin + chain.step_seconds
            first_rounds.missed(first, bucket, took, chain.graphs, capture)
        self.catch_up(program, rows, places)
        return program, True

    def catch_up(self, program: RoundProgram, rows: Rows, places: Sequence[int]) -> bool:
        """Let the levels of the coming round read what it does not feed them; whether any had to."""
        late = False
        for depth, index in enumerate(program.active, start=1):
            level, held = self.chain.levels[index + 1], self._held[index]
            behind = [
                r for r, row in enumerate(rows)
                if level.own_cache and self._last[r] != program.active and len(row) - held[r] > depth + 1
            ]  # fmt: skip
            if behind:
                behind.sort(key=lambda r: places[r])
                lines, cached = [rows[r][:-1] for r in behind], [held[r] for r in behind]
                view = [places[r] for r in behind], lines, cached, program.windows[depth]
                self.drafters[index].stats.forwards += self.chain.read(level, *view)
                late = True
        return late

    def launched(self, program: RoundProgram, rows: Rows, end: Callable[[int], int]) -> None:
        """A round of these rows has begun, of which row r may reach end(r) tokens."""
        for depth, index in enumerate(program.active, start=1):
            held = self._held[index]
            for r, row in enumerate(rows):
                if len(row) + depth < end(r):  # each level leaves a token for the one above: else it drafts nothing
                    held[r] = len(row)
        self._last = [program.active] * len(rows)


def read(level: RoundLevel, places: list[int], rows: Rows, cached: list[int], draft_window: int = 0) -> int:
    """Write keys and values of the rows, but the first cached[r] tokens of each, into rising places, tokens seeing
    what the window leaves; -> steps run."""
    steps, first = 0, 0
    if level.states is not None:
        level.states.forget([place for place, held in zip(places, cached, strict=True) if held == 0])
    while first < len(rows):
        last = first + 1
        while last < len(rows) and places[last] == places[last - 1] + 1:
            last += 1
        kv = level.kv[:, :, places[first] : places[last - 1] + 1]
        states = None if level.states is None else level.states.part(places[first], places[last - 1] + 1)
        steps += prefill(level.decoder, kv, rows[first:last], cached[first:last], level.bits, draft_window, states)
        first = last
    return steps


def by_length(rows: Rows, free: list[int]) -> list[int]:
    """A place for each row: prompts in order of falling length take the fewest steps to prefill."""
    places = [0] * len(rows)
    for place, r in zip(free, sorted(range(len(rows)), key=lambda r: -len(rows[r])), strict=False):
        places[r] = place
    return places
