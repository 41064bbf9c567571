"""Does a call leave out levels that keep its target from captured rounds?

A target alone is captured on a GPU. Some levels cannot be: with them the host launches every pass, those of "off" too.
Where passes are short, as of small models, no draft makes up for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .stats import SpeculationStats

_TRIAL_SHARE = 0.01  # of the seconds without the levels may go to finding out whether calls with them are faster


@dataclass(frozen=True)
class Outlook:
    """What is expected of a call. lost: the seconds it takes more with its levels than without. off_speed: tokens a
    second without them, captured."""

    lost: float
    off_speed: float


@dataclass
class Shelf:
    """What is known of the calls of one chain. spare: seconds that may be lost in calls with the levels. outlooks: by
    rows, and new tokens up to a factor of two; kept until a call with the levels has shown more."""

    spare: float = 0.0
    outlooks: dict[tuple[int, int], Outlook] = field(default_factory=dict)


@dataclass
class Shelving:
    """One call. outlook: of rows of these lengths, and as many new tokens. left_out: what was expected where the call
    runs without its levels; None: it has them."""

    shelf: Shelf
    outlook: Callable[[list[int], int], Outlook]
    left_out: Outlook | None = None

    def leaves_out(self, lengths: list[int], new_tokens: int) -> bool:
        """Whether the call runs without its levels."""
        shelf, like = self.shelf, (len(lengths), new_tokens.bit_length())
        found = shelf.outlooks.get(like) or self.outlook(lengths, new_tokens)
        if found.lost > shelf.spare:
            shelf.outlooks[like] = self.left_out = found
            return True
        shelf.spare -= max(found.lost, 0.0)
        shelf.outlooks.clear()
        return False

    def settle(self, stats: SpeculationStats) -> None:
        """The call has ended: what it wrote where it left its levels out."""
        if self.left_out is None:
            return
        tokens, seconds = stats.new_tokens - stats.prefill_tokens, stats.seconds - stats.prefill_seconds
        self.shelf.spare += _TRIAL_SHARE * stats.seconds
        expected = tokens / self.left_out.off_speed
        stats.of_plan("off").count(tokens, seconds, tokens, expected, expected, rounds=stats.target_passes)
