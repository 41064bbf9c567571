"""How far is a training: by the number of its steps, or by the clock?"""

from __future__ import annotations

import time
from collections.abc import Iterator


class Progress:
    """Shares of a training in [0, 1), step by step: by their number where it is given, else by the clock."""

    def __init__(self, steps: int | None, seconds: float):
        self.steps, self.seconds, self.done, self.began = steps, seconds, 0, time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def __iter__(self) -> Iterator[float]:
        while (share := self.done / self.steps if self.steps else self.elapsed() / self.seconds) < 1:
            yield share
            self.done += 1
