"""What was streamed, in all and within a block that somebody counts?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..nn.plane_source import PlaneCounts

_UNSETTLED = 1024  # waits on a GPU whose seconds are not yet added up, at most


class PlaneCounting:
    """Counts of a loader. total: of all since `reset`. Whoever counts holds the loader's lock."""

    def __init__(self) -> None:
        self.total = PlaneCounts()
        self._thread = threading.local()
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event, list[PlaneCounts]]] = []

    def add(self, **more: float) -> None:
        """Count for all, and for the blocks that this thread is in."""
        for counts in (self.total, *self._blocks()):
            for name, value in more.items():
                setattr(counts, name, getattr(counts, name) + value)

    def stalled(self, waited: float | tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
        """Count seconds, or those between two events, in which a product waited."""
        if isinstance(waited, float):
            self.add(stall_seconds=waited)
            return
        self._stalls.append((*waited, [self.total, *self._blocks()]))
        while len(self._stalls) > _UNSETTLED and self._stalls[0][1].query():
            self._settle_first()

    def _settle_first(self) -> None:
        before, after, counts = self._stalls.pop(0)
        try:
            after.synchronize()
            seconds = before.elapsed_time(after) / 1e3
        except torch.AcceleratorError:
            return  # the device failed, as the next product is told: a wait on it has no end
        for one in counts:
            one.stall_seconds += seconds

    def _blocks(self) -> list[PlaneCounts]:
        return getattr(self._thread, "counts", [])

    @contextmanager
    def block(self, lock: threading.RLock) -> Iterator[PlaneCounts]:
        """A block whose products, in this thread, are counted in what it gives. lock: the loader's."""
        own = PlaneCounts()
        self._thread.counts = [*self._blocks(), own]
        try:
            yield own
        finally:
            self._thread.counts = [one for one in self._blocks() if one is not own]
            with lock:
                while self._stalls:
                    self._settle_first()

    def reset(self) -> None:
        """All of it zero."""
        self._stalls.clear()
        self.total.reset()
