"""Has what a choice rests on changed so much that another plan may be better? Asking takes little beside choosing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .estimates import PairEstimate
from .memory import Memory

_NEAR = 0.03  # by which the chance of a pair may move
_MORE = 1.5  # times the observations of a pair, from where on its doubt is another one
_SAVED = 2.0, 0.25  # times the seconds for trials, and a share of a round: with more a trial may be paid that was not
_MOST = 4  # times in a row


@dataclass
class Steady:
    """What was known when a plan was chosen."""

    pairs: dict[tuple[int, int], tuple[PairEstimate, float, float]] = field(default_factory=dict)
    spare: float = 0.0
    left: int = 0

    def mark(self, memory: Memory, round_seconds: float) -> None:
        """A plan was chosen, whose rounds take so long."""
        self.pairs = {key: (pair, pair.mean, _MORE * (pair.total.tried + 1.0)) for key, pair in memory.pairs.items()}
        self.spare, self.left = _SAVED[0] * max(memory.spare, 0.0) + _SAVED[1] * round_seconds, _MOST

    def forget(self) -> None:
        """Rows or rounds have changed: choose anew."""
        self.left = 0

    def holds(self, memory: Memory) -> bool:
        """Whether the choice stands for as many rounds once more."""
        if not self.left or memory.spare > self.spare or len(memory.pairs) != len(self.pairs):
            return False
        self.left -= 1
        return all(math.fabs(pair.mean - mean) <= _NEAR and pair.total.tried <= most
                   for pair, mean, most in self.pairs.values())  # fmt: skip
