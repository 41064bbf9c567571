"""How many tokens of a long prompt fit between two rounds, so that running rows hardly wait?"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_STEP = 16  # tokens; a chunk is a multiple of it
_SHARE = 1.0  # of a round's time that a chunk may take: a gap of 2 rounds, with room for one that takes longer
_ROUNDS = 15  # the last ones, whose median counts


class Pace:
    """Chunks of at most `most` tokens beside rounds that are timed. On a GPU, which works behind the host, chunks are
    timed by events, and the round that waited for one is shorter by it.
    """

    def __init__(self, most: int, device: torch.device):
        self.most, self.device = most, device
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)
        self._tokens, self._seconds = 0, 0.0  # of the last chunk that was timed
        self._running: deque[tuple] = deque(maxlen=_ROUNDS)  # tokens and events of chunks that a GPU may be at

    def chunk(self) -> int:
        """Tokens of the next chunk beside running rows."""
        if not self._tokens or not self._rounds:
            return min(_STEP, self.most)
        fitting = self._tokens * _SHARE * statistics.median(self._rounds) / max(self._seconds, 1e-9)
        fitting = min(fitting, 2 * max(self._tokens, _STEP))  # costs change with the number of tokens
        return min(max(int(fitting) // _STEP * _STEP, _STEP), self.most)

    @contextmanager
    def reading(self, tokens: int) -> Iterator[None]:
        """A chunk of so many tokens is being read."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._tokens, self._seconds = tokens, time.perf_counter() - begin
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._running.append((tokens, begin, end))

    def took(self, seconds: float) -> None:
        """A round is over that took so long."""
        while self._running and self._running[0][2].query():
            self._tokens, begin, end = self._running.popleft()
            self._seconds = begin.elapsed_time(end) / 1000
            seconds -= self._seconds
        if seconds > 0:
            self._rounds.append(seconds)
