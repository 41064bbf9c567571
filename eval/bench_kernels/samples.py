"""How long is a call when nobody else wants the processor? Calls of several contenders in turn, and their waits.

A call counts where the threads of this process waited for a core less than 1 % of the time they had, which Linux keeps
in /proc/self/task/*/schedstat. Before each call the threads of the contender before it must have stopped spinning, and
one untimed call on another copy of the weights wakes the contender's own: back to back is how a decoder calls it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MAX_WAIT = 0.01  # of the call's time, over all its threads
_TASKS = Path("/proc/self/task")
_SETTLE_SECONDS = 0.1  # the longest that known pools spin after their work is a tenth of this
_IDLE_SHARE = 0.05


@dataclass
class Series:
    """What one contender's calls took: seconds of the uncontended and, apart, of the contended ones.

    rounds: of every call in turn its seconds, None where it was contended.
    """

    name: str
    call: Callable[[], object]
    nbytes: int  # read by one call
    seconds: list[float] = field(default_factory=list)
    contended: list[float] = field(default_factory=list)
    rounds: list[float | None] = field(default_factory=list)

    def median(self) -> float | None:
        """Of the uncontended calls; None without any."""
        return statistics.median(self.seconds) if self.seconds else None

    def add(self, seconds: float, quiet: bool) -> None:
        """One call."""
        (self.seconds if quiet else self.contended).append(seconds)
        self.rounds.append(seconds if quiet else None)

    def over(self, other: Series) -> float | None:
        """The median of this one's seconds over the other's in the same round, in which the machine was in the same
        state; None without a round in which both were uncontended."""
        both = [mine / its for mine, its in zip(self.rounds, other.rounds, strict=True) if mine and its]
        return statistics.median(both) if both else None


def scheduled() -> dict[str, tuple[int, int]]:
    """Nanoseconds every thread of this process has run, and has waited for a core."""
    found = {}
    for task in os.listdir(_TASKS):
        try:
            run, wait, _ = (_TASKS / task / "schedstat").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile
        found[task] = int(run), int(wait)
    return found


def has_schedstat() -> bool:
    """Whether this system counts how long threads wait."""
    return (_TASKS / str(os.getpid()) / "schedstat").exists()


def settle() -> None:
    """Returns when no other thread of this process runs any more, or after a tenth of a second."""
    end = time.perf_counter() + _SETTLE_SECONDS
    me = str(os.getpid())
    while time.perf_counter() < end:
        before, begin = scheduled(), time.perf_counter_ns()
        time.sleep(0.001)
        now, passed = scheduled(), time.perf_counter_ns() - begin
        busy = sum(run - before.get(task, (run, 0))[0] for task, (run, _) in now.items() if task != me)
        if busy < _IDLE_SHARE * passed:
            return


def sample(series: Series, threads: int, max_wait: float = MAX_WAIT, own_time: bool = False) -> None:
    """One timed call, after an untimed one. own_time: by the processor time of all threads, contended or not."""
    settle()
    series.call()
    if own_time:
        begin = time.process_time_ns()
        series.call()
        series.add((time.process_time_ns() - begin) / 1e9, quiet=True)
        return
    before = scheduled()
    begin = time.perf_counter_ns()
    series.call()
    nanoseconds = time.perf_counter_ns() - begin
    waited = sum(wait - before.get(task, (0, 0))[1] for task, (_, wait) in scheduled().items())
    quiet = waited < max_wait * nanoseconds * threads
    series.add(nanoseconds / 1e9, quiet)


def alternate(
    field_: list[Series], samples: int, max_rounds: int, threads: int, max_wait: float = MAX_WAIT,
    own_time: bool = False,
) -> None:  # fmt: skip
    """Rounds of one call each until every contender has `samples` uncontended calls, at most `max_rounds`."""
    for _ in range(max_rounds):
        for series in field_:
            sample(series, threads, max_wait, own_time)
        if all(len(series.seconds) >= samples for series in field_):
            return
