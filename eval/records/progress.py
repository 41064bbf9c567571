"""How far is a long run? Bars on a terminal; elsewhere a line now and then, so that a log does not stay silent."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between two lines, at least
_BEGAN = time.monotonic()
_said = _BEGAN


class Bars(Progress):
    """rich's bars, on stderr, as stdout is for the tables. Where that is no terminal, a line says what was finished,
    at most one every `EVERY` seconds of the process."""

    def __init__(self) -> None:
        console = Console(stderr=True, force_terminal=sys.stderr.isatty())
        super().__init__(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                         TimeRemainingColumn(), console=console, disable=not console.is_terminal)

    def advance(self, task_id: Any, advance: float = 1) -> None:
        """So many more are finished."""
        super().advance(task_id, advance)
        task = self._tasks[task_id]
        tell(f"{task.description}: {task.completed:g} of {task.total:g}")


def tell(line: str) -> None:
    """A line and the time since the start, where stderr is no terminal and the last one is a while ago."""
    global _said
    if sys.stderr.isatty() or (now := time.monotonic()) - _said < EVERY:
        return
    _said = now
    print(f"{line} after {timedelta(seconds=round(now - _BEGAN))}", file=sys.stderr, flush=True)
