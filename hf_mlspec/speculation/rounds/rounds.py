"""What must every kind of round be able to do, and what does it raise when memory runs out?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..checker import Verdict
from ..draft import Rows
from ..stats import SpeculationStats
from .beginning import Beginnings


class Rounds(Protocol):
    """How the rounds of a chain run: on the host (host.py), or captured on a device (captured.py).

    The loop owns the rows. When a row joins, rounds are given its maximal length (`ends`) and its number (`numbers`).
    drafted: tokens drafted for each row in the last round. drafted_by: the level that drafts for the target there;
    None where none does, and every token took a pass. places: the line of each row in the target's cache. begun: what
    was read of rows that join, which their caches are given.
    """

    drafted: list[int]
    drafted_by: str | None
    places: Sequence[int]
    begun: Beginnings

    def start(self, rows: Rows, ends: list[int], numbers: list[int], cached: int) -> None:
        """Forget every earlier row and start with these; the target's cache holds `cached` tokens of each."""

    def refusal(self, end: int) -> str:
        """Why a row that may reach `end` tokens cannot join those that started; "" where it can."""

    def admit(self, rows: Rows, ends: list[int], numbers: list[int]) -> None:
        """These rows join behind the others. NoRoom where there is no memory for them."""

    def replace(self, places: list[int], rows: Rows, ends: list[int], numbers: list[int], common: list[int]) -> None:
        """Other rows take the places of these; the first `common` tokens of both are the same. NoRoom as `admit`."""

    def select(self, keep: list[int]) -> None:
        """Go on with the rows of these indices only, in this order."""

    def run(self, rows: Rows, stats: SpeculationStats) -> Verdict:
        """One round: propose, check, roll back. Passes are counted in `stats`; `rows` comes back unchanged.

        A row that joined while a round was under way is not part of it: its verdict holds no tokens.
        """

    def commit(self, rows: Rows, gained: list[int], going: list[int], stats: SpeculationStats) -> None:
        """The rows have grown by `gained` tokens of the last verdict, `going` go on, and nobody has been told yet."""

    def account(self, stats: SpeculationStats) -> None:
        """Write down where the seconds of the rounds so far went; `stats.seconds` is up to date."""


@dataclass
class Unfinished:
    """What is left of a call: rows that may go on, their numbers, the tokens each may gain, the counts so far."""

    rows: Rows
    numbers: list[int]
    budgets: list[int]
    stats: SpeculationStats


class NoRoom(RuntimeError):
    """There is not enough memory for more cache slots, or more rows, beside captured rounds.

    left: the rows that are still to be decoded, in another way.
    """

    def __init__(self, message: str, left: Unfinished | None = None):
        super().__init__(message)
        self.left = left
