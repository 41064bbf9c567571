"""The loop of decoding: rows join, gain tokens round by round, and leave; rounds/ says how a round runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import torch

from .checker import Checker, Verdict
from .draft import Drafter, Rows
from .drafters.agreement import common_prefix
from .rounds.host import HostRounds
from .rounds.rounds import NoRoom, Rounds, Unfinished
from .stats import SpeculationStats

# (row number, row before, accepted tokens) -> (how many of them count, whether the row is finished)
Stop = Callable[[int, list[int], list[int]], tuple[int, bool]]
# (row numbers, the tokens that counted, the verdict they came from)
Emit = Callable[[list[int], Rows, Verdict], None]


def decode(
    target: Checker,
    drafter: Drafter | None,
    rows: Rows,
    budgets: list[int],
    *,
    num_draft_tokens: int,
    device: torch.device,
    stop: Stop | None = None,
    emit: Emit | None = None,
    ends: frozenset[int] = frozenset(),
    cached: int = 0,
) -> SpeculationStats:
    """Extend every row to its end, see `Loop`, in rounds of the host; `rows` grow in place.

    budgets: tokens each row may still gain. num_draft_tokens: the most a draft may hold. cached: leading tokens of
    a single row whose keys and values the target's cache, started by the caller, already holds.
    """
    rounds = HostRounds(target, drafter, num_draft_tokens=num_draft_tokens, device=device)
    return Loop(rounds, stop=stop, emit=emit, ends=ends).decode(rows, budgets, cached)


@dataclass(eq=False)
class Loop:
    """The rows that a chain is decoding, and the rounds in which they gain tokens.

    stop, ends: a row ends when `stop` says so; without `stop` after the first token it gains of `ends`. Either way it
        ends at its maximal length.
    emit: called after every round; None: no callback.
    rows, numbers, lengths: for every row its tokens, its number for `stop` and `emit`, and its maximal length.
    """

    rounds: Rounds
    _: KW_ONLY
    stop: Stop | None = None
    emit: Emit | None = None
    ends: frozenset[int] = frozenset()
    rows: Rows = field(default_factory=list, init=False)
    numbers: list[int] = field(default_factory=list, init=False)
    lengths: list[int] = field(default_factory=list, init=False)
    stats: SpeculationStats = field(default_factory=SpeculationStats, init=False)

    @property
    def drafted(self) -> list[int]:
        """Tokens drafted for each row in the last round."""
        return self.rounds.drafted

    def decode(self, rows: Rows, budgets: list[int], cached: int = 0) -> SpeculationStats:
        """Start with these rows and go on until every one has stopped; see `decode`."""
        self.start(rows, budgets, cached)
        while going := self.round():
            self.select(going)
        return self.stats

    def start(self, rows: Rows, budgets: list[int], cached: int = 0, numbers: list[int] | None = None) -> None:
        """These rows from the beginning, in a cache of the target's that the caller started; see `decode`. numbers:
        theirs, if they are not 0, 1, 2 ..."""
        begin = time.perf_counter()
        self._append(rows, budgets, list(range(len(rows))) if numbers is None else numbers)
        self.rounds.start(rows, self.lengths, self.numbers, cached)
        self.stats.seconds += time.perf_counter() - begin

    def admit(self, rows: Rows, budgets: list[int], numbers: list[int]) -> None:
        """These rows join behind the others. ValueError, before anything changes, for one that the rounds refuse."""
        begin = time.perf_counter()
        ends = [len(row) + budget for row, budget in zip(rows, budgets, strict=True)]
        self._require_accepted(ends)
        self._append(rows, budgets, numbers)
        with self._leaving_rows():
            self.rounds.admit(rows, ends, numbers)
        self.stats.seconds += time.perf_counter() - begin

    def replace(self, places: list[int], rows: Rows, budgets: list[int], numbers: list[int]) -> None:
        """Other rows take the places, and the slots of the caches, of rows that ended.

        What both begin with, such as the examples of a few-shot prompt, may stay in the target's cache. ValueError as
        of `admit`.
        """
        if not places:
            return
        begin = time.perf_counter()
        ends = [len(row) + budget for row, budget in zip(rows, budgets, strict=True)]
        self._require_accepted(ends)
        common = [common_prefix(self.rows[r], row) for r, row in zip(places, rows, strict=True)]
        for r, row, number, end in zip(places, rows, numbers, ends, strict=True):
            self.rows[r], self.numbers[r], self.lengths[r] = row, number, end
        with self._leaving_rows():
            self.rounds.replace(places, rows, ends, numbers, common)
        self.stats.seconds += time.perf_counter() - begin

    def select(self, keep: list[int]) -> None:
        """Go on with the rows of these indices only, in this order."""
        if keep == list(range(len(self.rows))):
            return
        lines = self.rows, self.numbers, self.lengths
        self.rows, self.numbers, self.lengths = ([line[r] for r in keep] for line in lines)
        self.rounds.select(keep)

    def round(self) -> list[int]:
        """One round of all rows; the indices of those that have not stopped."""
        begin = time.perf_counter()
        with self._leaving_rows():
            verdict = self.rounds.run(self.rows, self.stats)
        verdict.drafted_by = self.rounds.drafted_by
        going = self._commit(verdict)
        self.stats.seconds += time.perf_counter() - begin
        self.rounds.account(self.stats)
        return going

    def _append(self, rows: Rows, budgets: list[int], numbers: list[int]) -> None:
        self.rows += rows
        self.numbers += numbers
        self.lengths += [len(row) + budget for row, budget in zip(rows, budgets, strict=True)]

    def _require_accepted(self, ends: list[int]) -> None:
        """ValueError for rows of which the rounds say that they cannot join."""
        for end in ends:
            if reason := self.rounds.refusal(end):
                raise ValueError(f"a row that may reach {end} tokens cannot join: {reason}")

    @contextmanager
    def _leaving_rows(self) -> Iterator[None]:
        """Where there is no room to go on, the error says with what."""
        try:
            yield
        except NoRoom as error:
            budgets = [end - len(row) for end, row in zip(self.lengths, self.rows, strict=True)]
            error.left = Unfinished(self.rows, self.numbers, budgets, self.stats)
            raise

    def _commit(self, verdict: Verdict) -> list[int]:
        """Append what counts of every row's accepted tokens; the indices of the rows that go on."""
        going, kept = [], []
        for r, (row, tokens) in enumerate(zip(self.rows, verdict.tokens, strict=True)):
            tokens = tokens[: self.lengths[r] - len(row)]
            # A row that was not part of the round has nothing to be stopped for.
            count, finished = self._counted(self.numbers[r], row, tokens) if tokens else (0, False)
            kept.append(tokens[:count])
            row += tokens[:count]
            if not finished and len(row) < self.lengths[r]:
                going.append(r)
        self.stats.new_tokens += sum(map(len, kept))
        try:
            self.rounds.commit(self.rows, [len(tokens) for tokens in kept], going, self.stats)
        finally:  # where what comes next cannot begin, these tokens are told all the same
            if self.emit is not None:
                self.emit(self.numbers, kept, verdict)
        return going

    def _counted(self, number: int, row: list[int], tokens: list[int]) -> tuple[int, bool]:
        """How many of a row's accepted tokens count, and whether it is finished."""
        if self.stop is not None:
            return self.stop(number, row, tokens)
        last = next((place for place, token in enumerate(tokens) if token in self.ends), None)
        return (len(tokens), False) if last is None else (last + 1, True)
