"""Does a call leave out levels that keep its target from captured rounds?

A target alone is captured on a GPU. Some levels cannot be: with them the host launches every pass, those of "off" too.
Where passes are short, as of small models, no draft makes up for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .stats import PlanStats, SpeculationStats

_TRIAL_SHARE = 0.01  # of the seconds without the levels may go to finding out whether calls with them are faster
_FIRST_TRIALS = 0.05  # seconds, before anything is known
_here = threading.local()


def are_kept() -> bool:
    """Whether calls of this thread leave no level out."""
    return getattr(_here, "kept", False)


@contextmanager
def levels_kept() -> Iterator[None]:
    """Calls of this thread leave no level out: they are about the levels."""
    before = are_kept()
    _here.kept = True
    try:
        yield
    finally:
        _here.kept = before


@dataclass(frozen=True)
class Outlook:
    """What is expected of a call. lost: the seconds it takes more with its levels than without, up to the tokens that
    rows are expected to gain. off_speed: tokens a second without them, captured."""

    lost: float
    off_speed: float


@dataclass
class Shelf:
    """What is known of the calls of one chain. spare: seconds that may be lost in calls with the levels. outlooks: by
    rows, and by tokens of the prompt and new ones up to a factor of two; kept until a call with the levels has shown
    more."""

    spare: float = _FIRST_TRIALS
    outlooks: dict[tuple[int, int, int], Outlook] = field(default_factory=dict)


@dataclass
class Shelving:
    """One call. outlook: of rows of these lengths, and as many new tokens. expected: what it said. left_out: whether
    the call runs without its levels."""

    shelf: Shelf
    outlook: Callable[[list[int], int], Outlook]
    expected: Outlook | None = None
    left_out: bool = False

    def leaves_out(self, lengths: list[int], new_tokens: int) -> bool:
        """Whether the call is to run without its levels."""
        if are_kept():
            return False
        shelf, like = self.shelf, (len(lengths), max(lengths).bit_length(), new_tokens.bit_length())
        self.expected = shelf.outlooks.get(like) or self.outlook(lengths, new_tokens)
        if self.expected.lost > max(shelf.spare, 0.0):
            shelf.outlooks[like] = self.expected
            return True
        shelf.outlooks.clear()
        return False

    def settle(self, stats: SpeculationStats) -> None:
        """The call has ended: seconds for trials, and the counts of one without levels."""
        if self.expected is None:
            return
        if self.left_out:
            self.shelf.spare += _TRIAL_SHARE * stats.seconds
            tell_off(stats, self.expected.off_speed)
        elif self.expected.lost > 0:
            tokens, seconds = decoded(stats)
            self.shelf.spare -= max(seconds - tokens / self.expected.off_speed, 0.0)


def tell_off(stats: SpeculationStats, off_speed: float) -> None:
    """Count a call without its levels as one of "off". off_speed: tokens a second that were expected of it."""
    tokens, seconds = decoded(stats)
    alone, off = PlanStats(rounds=stats.target_passes), tokens / off_speed
    if tokens:
        alone.add(PlanStats(0, stats.target_passes, tokens, seconds, tokens, off, off))
    stats.of_plan("off").add(alone)


def decoded(stats: SpeculationStats) -> tuple[int, float]:
    """Tokens behind the first ones of a call, and their seconds."""
    return max(stats.new_tokens - stats.prefill_tokens, 0), stats.seconds - stats.prefill_seconds
