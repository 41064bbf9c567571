"""How do the runners of a chain get the caches of its captured rounds, and what is left where those cannot grow?"""

from __future__ import annotations

from dataclasses import dataclass

from ..engines.rows import DecoderCache
from .captured_chain import CapturedChain
from .checker import Checker
from .draft import Drafter, Rows
from .drafters.model import ModelDrafter
from .stats import SpeculationStats
from .trace_recorder import checkers


@dataclass
class Unfinished:
    """What is left of a call: rows that may go on, their numbers, the tokens each may gain, the counts so far."""

    rows: Rows
    numbers: list[int]
    budgets: list[int]
    stats: SpeculationStats


class NoRoom(RuntimeError):
    """Rows have filled their slots, and there is no memory for more of them beside captured rounds."""

    def __init__(self, message: str, left: Unfinished):
        super().__init__(message)
        self.left = left


def adopt(chain: CapturedChain, target: Checker, drafter: Drafter | None, rows: int) -> None:
    """The chain's caches become those of its runners for a call of so many rows."""
    for runner, level in zip(_runners(target, drafter), chain.levels, strict=True):
        runner.cache, runner.lengths = DecoderCache(level.kv, rows), [0] * rows


def disown(target: Checker, drafter: Drafter | None) -> None:
    """No runner holds a cache, so that a chain's can be freed."""
    for runner in _runners(target, drafter):
        runner.cache = None


def drafters(drafter: Drafter | None) -> list[Drafter]:
    """Who drafts, outermost first."""
    found = []
    while drafter is not None:
        found.append(drafter)
        drafter = getattr(drafter, "inner", None)
    return found


def _runners(target: Checker, drafter: Drafter | None) -> list:
    """Those of all levels, the target's first."""
    last = [one.runner for one in drafters(drafter) if isinstance(one, ModelDrafter)]
    return [checker.runner for checker in checkers(target, drafter)] + last
