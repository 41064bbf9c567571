"""Has a round of the target alone all its steps, or one, as its rows end before or wait for their first token?"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from .chain import CapturedChain
from .program import RoundProgram

_SOME = 1e-9  # seconds of a step, until a round has shown more
_WAIT = 5e-5  # seconds, at least, that a round more costs: the host launches it and waits

class Steps:
    """What is known of the coming round.

    A round of many steps has one wait of the host, and tells its first token with its last one. soon: rows that join
    get their first token from a round of one step, where they wait so much less that it outweighs one wait more of all
    rows for the host, or where one was read beside the others: these waited for it to join, and are not to wait for a
    whole round behind that. Of a stream, which tells tokens as they come. joined: rows that did since the last launch;
    read: whether all was read of one of them before. Where processes share the target no clock is asked, as theirs
    differ.
    """

    def __init__(self, chain: CapturedChain):
        self.chain, self.soon, self.joined, self.read = chain, False, 0, False
        self._is_shared = chain.levels[0].decoder.ranks is not None
        self._host = 0.0  # seconds that the host had to do between two rounds, where no row joined
        self._since: float | None = None  # when the last round had ended; None: rows joined since, or there was none

    def join(self, rows: int, read: bool) -> None:
        """So many rows join. read: whether nothing is left to read of one of them."""
        self.joined, self.read, self._since = self.joined + rows, self.read or read, None

    def launched(self) -> None:
        """The coming round has become the one under way."""
        self.joined, self.read = 0, False

    def waits(self) -> None:
        """The host has nothing left to do but wait for the round under way."""
        if self._since is not None:
            self._host = perf_counter() - self._since

    def ended(self, program: RoundProgram) -> None:
        """The round under way, of this program, has ended."""
        if program.lead == 1:  # else it read, too
            self.chain.step_seconds = self.chain.graphs.round_seconds / program.steps
        self._since = perf_counter()

    def wanted(self, program: RoundProgram, left: int, rows: int) -> RoundProgram:
        """The program, or a single step, captured or not. left: the most tokens that a row may gain; rows: that run.
        """
        return self.chain.single if self._saved(program, left, rows) > 0 else program

    def chosen(self, program: RoundProgram, left: int, rows: int, bucket: int, capture: Callable) -> RoundProgram:
        """As `wanted`, a single step once that has saved its capture. bucket: rows that the round is launched for;
        capture: makes a graph of a program for as many, and says whether there is memory for it."""
        chain, single, saved = self.chain, self.chain.single, self._saved(program, left, rows)
        if saved <= 0 or chain.graphs.has(single, bucket):
            return single if saved > 0 else program
        chain.idle_seconds += saved
        price = 0.0 if self._is_shared else chain.graphs.seconds_to_capture(single)
        if chain.idle_seconds < price:
            return program
        chain.idle_seconds -= price
        return single if capture(single, bucket) else program

    def _saved(self, program: RoundProgram, left: int, rows: int) -> float:
        """Seconds that a single step saves over the program: the steps behind the last token, or what rows that joined
        wait less than all of them wait more."""
        step = self.chain.step_seconds
        if left < program.steps:
            return (program.steps - left) * max(step, _SOME)
        if not self.soon or not self.joined or self._is_shared:
            return 0.0
        if self.read:
            return (program.steps - 1) * max(step, _SOME)
        return self.joined * (program.steps - 1) * step - rows * max(self._host - step, _WAIT)

