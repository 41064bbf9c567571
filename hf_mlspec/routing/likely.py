"""Which planes is a prompt likely to read, before its router has chosen? As many as recent prompts read.

Every block keeps what the last prompts chose, and the widest of them is asked for. A prompt that chooses a wider one
is read again, with the planes that it lacked: time, never a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

RECENT = 32  # prompts
TRIES = 2  # times a prompt is read with planes that are likely, before the host waits for each choice


class LikelyWidths:
    """Of every block."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, ...]] = deque(maxlen=RECENT)

    def saw(self, widths: Sequence[int]) -> None:
        """What a prompt chose, block by block."""
        self._recent.append(tuple(widths))

    def of_all(self) -> list[int] | None:
        """Planes of every block; None before the first prompt."""
        return [max(own) for own in zip(*self._recent, strict=True)] if self._recent else None
