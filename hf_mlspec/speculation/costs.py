"""How long does a forward pass take on this machine, by the number of tokens in it and what they attend to?"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from time import perf_counter, time
from typing import TypeVar

import numpy as np

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)  # in one pass, of all rows together
FEW_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of a short probe
LONG = 1024  # slots that a row already has where the cost of attention is measured
_AT_LONG = 8  # tokens of the pass that measures it
_LEFT_OVER = 2.0  # of a budget as much is left for what comes later as goes to one number of tokens
DISTURBED = 0.8  # of what was measured: passes that take less say that something else ran at the time
_LEAST = 1e-7  # seconds; a clock that stood still is no cost
_FAR = 2.0**20  # tokens, more than any pass has
Numbers = TypeVar("Numbers", float, np.ndarray)


@dataclass(frozen=True)
class PassCosts:
    """Seconds of one forward pass of a model, as measured.

    tokens: rising numbers of tokens in a pass, summed over rows. seconds: the least that was measured of each, as
    what else the machine does only adds. spread: (median - least) / least of each. attention: seconds for one token
    and one slot that it attends to. most_slots: that a token attends to, whatever its row holds; None: all of them.
    measured: when, in seconds of `time.time()`, 0 if that is not known; held: seconds after that when passes, timed
    again, took no less.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...]
    attention: float = 0.0
    most_slots: int | None = None
    measured: float = field(default=0.0, compare=False)
    held: float = field(default=0.0, compare=False)

    def __post_init__(self):
        counts, times = self.tokens, self.seconds
        if not counts or len({len(counts), len(times), len(self.spread)}) > 1:
            raise ValueError(f"{len(counts)} token counts, {len(times)} times, {len(self.spread)} spreads")
        if list(counts) != sorted(set(counts)) or counts[0] < 1:
            raise ValueError(f"token counts are {list(counts)}: they must rise from 1 or more")
        if not all(isinstance(t, (int, float)) and 0 < t < math.inf for t in times):
            raise ValueError(f"seconds are {list(times)}: each must be positive")
        if not all(isinstance(s, (int, float)) and 0 <= s < math.inf for s in self.spread):
            raise ValueError(f"spreads are {list(self.spread)}: none may be negative")
        if not 0 <= self.attention < math.inf:
            raise ValueError(f"attention is {self.attention}: it must be 0 or more seconds")
        if not all(0 <= when < math.inf for when in (self.measured, self.held)):
            raise ValueError(f"measured at {self.measured}, held {self.held}: they must be 0 or more seconds")

    def of(self, tokens: Numbers, slots: float = 0.0) -> Numbers:
        """Seconds of a pass over `tokens` tokens, each behind `slots` slots: straight lines between what was measured,
        and beyond it the last one. An array of tokens gives an array."""
        slots = slots if self.most_slots is None else min(slots, self.most_slots)
        if isinstance(tokens, np.ndarray):
            return np.interp(tokens, *self._line) + self.attention * slots * tokens
        return self._between(tokens) + self.attention * slots * tokens

    def _between(self, tokens: float) -> float:
        """`np.interp` of one number, which takes a tenth of its time."""
        counts, times = self._points
        at = min(max(bisect_right(counts, tokens), 1), len(counts) - 1)
        slope = (times[at] - times[at - 1]) / (counts[at] - counts[at - 1])
        return times[at - 1] + slope * min(max(tokens - counts[at - 1], 0.0), counts[at] - counts[at - 1])

    @cached_property
    def _points(self) -> tuple[list[float], list[float]]:
        counts, times = self._line
        return counts.tolist(), times.tolist()

    @cached_property
    def _line(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and seconds of the measured points, and of one far beyond them; with one point time is
        proportional to tokens."""
        counts, times = np.array(self.tokens, float), np.maximum.accumulate(np.array(self.seconds, float))
        before = (counts[-2], times[-2]) if len(counts) > 1 else (0.0, 0.0)
        slope = (times[-1] - before[1]) / (counts[-1] - before[0])
        return np.append(counts, _FAR), np.append(times, times[-1] + slope * (_FAR - counts[-1]))

    @property
    def uncertainty(self) -> float:
        """The median spread, 0 on an idle machine."""
        return sorted(self.spread)[len(self.spread) // 2]

    def scaled(self, later: PassCosts) -> PassCosts:
        """These costs where passes of few tokens, timed again, took less: those of more tokens are taken to be as much
        less as the largest of them, as what else ran at the time was in all."""
        share = min(later.seconds[-1] / self.of(float(later.tokens[-1])), 1.0)
        seconds = [one if count <= later.tokens[-1] else share * one
                   for count, one in zip(self.tokens, self.seconds, strict=True)]  # fmt: skip
        return replace(self, seconds=_rising(seconds), attention=share * self.attention)

    def least(self, later: PassCosts) -> PassCosts:
        """The less of two measurements of the same passes, as what else ran at the time only added; the cost of
        attention is that of the later one, if it has any."""
        best: dict[int, tuple[float, float]] = {}
        for one in (self, later):
            for count, *found in zip(one.tokens, one.seconds, one.spread, strict=True):
                best[count] = min(best.get(count, tuple(found)), tuple(found))
        seconds = _rising([best[count][0] for count in sorted(best)])
        return replace(later, tokens=tuple(sorted(best)), seconds=seconds, attention=later.attention or self.attention,
                       spread=tuple(best[count][1] for count in sorted(best)))  # fmt: skip

    def to_dict(self) -> dict:
        """Plain numbers, for JSON: what was measured."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "most_slots"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_dict(cls, given: dict) -> PassCosts:
        """What `to_dict` wrote; ValueError for anything else."""
        try:
            lines = {name: tuple(given[name]) for name in ("tokens", "seconds", "spread")}
            when = {name: float(given.get(name, 0.0)) for name in ("measured", "held")}
            return cls(**lines, attention=float(given["attention"]), **when)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"these are no costs of a forward pass: {error!r}") from error


def measure(
    run: Callable[[int, int], None],
    *,
    budget: float,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 3,
    step: Callable[[], None] = lambda: None,
    long: bool = True,
    passes: int = 1,
) -> PassCosts:
    """Time `run(tokens, slots)`, so many forward passes over so many tokens behind so many slots.

    budget: seconds in which measuring ends, whatever is left to measure; two numbers of tokens are always measured.
    repeats: passes of each in a row; one more once all were timed, as what else ran may have ended. step: called after
    each number of tokens, for a progress bar. long: whether rows of LONG slots can be run, which shows the cost of
    attention.
    """
    end = perf_counter() + budget
    run(1, 0)  # kernels are loaded, memory is touched
    last = _seconds(run, 1, 0)  # of all passes of a run
    taken: dict[int, list[float]] = {}
    for count in tokens:
        fits = int((end - perf_counter()) / (_LEFT_OVER * last))
        if len(taken) >= 2 and fits < 2:
            break
        taken[count] = [_seconds(run, count, 0) for _ in range(min(max(fits, 2), repeats))]
        last = min(taken[count])
        step()
    at_long = max(count for count in taken if count <= _AT_LONG)
    far = _far(run, at_long) if long and perf_counter() < end else 0.0
    for count in taken:
        if end - perf_counter() < _LEFT_OVER * min(taken[count]):
            break
        taken[count].append(_seconds(run, count, 0))
    lines = [sorted(taken[count]) for count in sorted(taken)]
    attention = max(far - min(taken[at_long]), 0.0) / (at_long * LONG)
    seconds = tuple(time / passes for time in _rising([line[0] for line in lines]))
    spread = tuple(map(_spread, lines))
    return PassCosts(tuple(sorted(taken)), seconds, spread, attention / passes, measured=time())


def _far(run: Callable[[int, int], None], count: int) -> float:
    """Seconds of a pass behind many slots, which shows the cost of attention."""
    run(count, LONG)
    return min(_seconds(run, count, LONG) for _ in range(3))


def _seconds(run: Callable[[int, int], None], tokens: int, slots: int) -> float:
    begin = perf_counter()
    run(tokens, slots)
    return max(perf_counter() - begin, _LEAST)


def _rising(times: list[float]) -> tuple[float, ...]:
    """More tokens never cost less; where fewer were measured to, something else ran at the time."""
    for i in range(len(times) - 2, -1, -1):
        times[i] = min(times[i], times[i + 1])
    return tuple(times)


def _spread(times: list[float]) -> float:
    return times[len(times) // 2] / times[0] - 1.0
