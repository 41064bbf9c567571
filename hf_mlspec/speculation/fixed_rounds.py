"""What does a round bring and cost that does the same work whatever is accepted, as when it is replayed on a GPU?

Every row drafts as much as the longest, rows that are done early are padding, and the rows themselves are padded to a
bucket. With b rows of a bucket, S slots that a token attends to and the names of controller.py:

    draft of the last level     t(b lead) + (k - 1) t(b)             lead: the last token, and one for each level above
    draft of a lookup           next to nothing
    draft, checked              R (draft of d tokens + t(b (d + lead)))      R = ceil(length / (d + 1)): it has
                                                                     D = R (d + 1) tokens at most
    check                       T(b (D + 1))
    tokens of a round           B (1 + sum over i <= E p_i)          E: expected length of the draft, D without levels
                                                                     in the middle
    rounds of B rows            L / u (1 + m(B) sqrt(v / (u L)))     L: tokens that a row may gain; u, v: mean and
                                                                     variance of those of a round; m(B): mean of the
                                                                     largest of B normal values: the slowest row ends
                                                                     the call. Few are counted one by one
    "off"                       T(b), as often as a round of the target alone has steps

Seconds do not depend on chances. They are found once for a number of rows, as straight lines over the slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .cells import Cells
from .costs import PassCosts
from .estimates import MOST
from .forecast import Expectations, Forecast
from .memory import LevelCosts, Memory
from .plans import LENGTHS, Plan
from .rounds.chain import bucket_of
from .rounds.program import MOST_PASSES, UNROLLED

_REPLAY_SECONDS = 6e-5  # of a round beside its passes: the report is read, the next round is launched
_LOOKUP_SECONDS = 1e-5  # of a level without a model, for all rows
_COUNTED = np.arange(1.0, 13.0)  # rounds of other plans that are counted one by one
_MOST_COUNTED = _COUNTED[-1] / 2  # expected rounds
_LENGTHS = np.array(LENGTHS, float)
_LARGEST = (0.0, 0.56, 1.03, 1.42, 1.77, 2.07, 2.34)  # of 1, 2, 4 ... 64 standard normal values, the mean
_APART = 1024.0  # slots between the two points of a line
_SQUARES = 2.0 * np.arange(MOST) + 3.0  # (i + 2) squared less (i + 1) squared: what token i adds to a round's square


class Passes:
    """Seconds of all passes of rounds.

    For each number of rows, and range of slots in which no level stops to see more, two lines over the slots: of the
    draft, and of draft and check, ``[2, cells]``, infinite where a round has too many passes.
    """

    def __init__(self, target: PassCosts, levels: tuple[LevelCosts, ...]):
        self.target, self.levels = target, levels
        models = [target, *(level.costs for level in levels if level.costs is not None)]
        self._bounds = sorted({0.0, *(float(one.most_slots) for one in models if one.most_slots is not None)})
        self._lines: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._repeats: dict[Cells, list[np.ndarray]] = {}

    def of(self, cells: Cells, rows: int, slots: float) -> np.ndarray:
        """Seconds of the draft, and of draft and check: ``[2, cells]``."""
        begin = max(bound for bound in self._bounds if bound <= slots)
        key = cells, rows, begin
        if key not in self._lines:
            end = next((bound for bound in self._bounds if bound > begin), begin + _APART)
            first, last = (self._at(cells, rows, float(at)) for at in (begin, end))
            many = np.isinf(first)
            first[many] = last[many] = 0.0
            slope = (last - first) / (end - begin)
            first[many] = np.inf
            self._lines[key] = first, slope
        first, slope = self._lines[key]
        return first + slope * (slots - begin)

    def repeats(self, cells: Cells) -> list[np.ndarray]:
        """Per step of the cells and part of a plan the rounds of the level below that make a draft."""
        if cells not in self._repeats:
            self._repeats[cells] = [
                np.concatenate([self._rounds(active).ravel() for active in step.parts]) for step in cells.steps
            ]
        return self._repeats[cells]

    def _at(self, cells: Cells, rows: int, slots: float) -> np.ndarray:
        found = np.empty((2, len(cells.choice)))
        for active in cells.choices:
            drafts, passes = self._draft(active, 1, rows, slots)
            seconds = drafts + self.target.of(rows * (self._most(active) + 1.0), slots) + _REPLAY_SECONDS
            seconds = np.where(passes + 1 > MOST_PASSES, np.inf, seconds)
            found[:, cells.of_levels(active)] = drafts.ravel(), seconds.ravel()
        return found

    def _most(self, active: tuple[int, ...]) -> np.ndarray:
        """Tokens that are handed up at most, by all lengths: an axis for each level."""
        return self._rounds(active) * (self._most(active[1:]) + 1.0) if len(active) > 1 else _LENGTHS

    def _rounds(self, active: tuple[int, ...]) -> np.ndarray:
        below = self._most(active[1:])
        return np.ceil(_LENGTHS.reshape(-1, *(1,) * below.ndim) / (below + 1.0))

    def _draft(self, active: tuple[int, ...], depth: int, rows: int, slots: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the drafts of active[0], `depth` levels below the target, and forward passes."""
        index, *below = active
        costs, lead = self.levels[index].costs, depth + 1.0 if self.levels[index].own_cache else 1.0
        if costs is None:
            return np.full_like(_LENGTHS, _LOOKUP_SECONDS), np.zeros_like(_LENGTHS)
        if not below:
            return costs.of(rows * lead, slots) + (_LENGTHS - 1.0) * costs.of(float(rows), slots), _LENGTHS
        seconds, passes = self._draft(tuple(below), depth + 1, rows, slots)
        check, rounds = costs.of(rows * (self._most(tuple(below)) + lead), slots), self._rounds(active)
        return rounds * (seconds + check), rounds * (passes + 1.0)


@lru_cache(maxsize=64)
def passes_of(target: PassCosts, levels: tuple[LevelCosts, ...]) -> Passes:
    """One object for these costs, as every call has a controller of its own."""
    return Passes(target, levels)


class FixedExpectations(Expectations):
    """Forecasts of rounds that do the same work whatever is accepted. passes: those of target and levels."""

    def __init__(
        self, target: PassCosts, levels: Sequence[LevelCosts], memory: Memory, *, corrected: bool,
        passes: Passes | None = None,
    ):  # fmt: skip
        super().__init__(target, levels, memory, corrected=corrected)
        self._passes = passes or passes_of(target, tuple(levels))

    def of_limits(self, plan: Plan, limits: Sequence[int], odds: Sequence[float], slots: float) -> Forecast[float]:
        """All rows draft as much as the plan says."""
        return self.of(plan, len(limits), len(limits), slots)

    def rounds(self, cells: Cells, batch: int, left: float, room: float, doubts: float = 0.0) -> np.ndarray:
        """Rounds by all plans until every row has gained `left` tokens of the `room` that it may: ``[cells]``."""
        mean, variance, length = self._gains(cells, doubts)
        many = left / mean
        if batch > 1:
            largest = np.interp(math.log2(batch), np.arange(len(_LARGEST)), _LARGEST)
            many *= 1.0 + largest * np.sqrt(variance / (mean * room))
        few = np.flatnonzero(many <= _MOST_COUNTED)
        if not len(few):
            return many
        behind = np.multiply.outer(mean[few], _COUNTED) - (left - 0.5)
        done = _below(behind / np.sqrt(np.multiply.outer(variance[few], _COUNTED)))
        wanted = math.ceil(left) - 1  # of a draft, where the first round is to be the last
        done[:, 0] = 0.0
        if wanted <= MOST:
            all_kept = self._reach(cells, doubts)[: cells.tops, wanted].take(cells.top_pair[few])
            done[:, 0] = np.where(length[few] >= wanted, all_kept, 0.0)
        many[few] = 1.0 + len(_COUNTED) - (done if batch == 1 else done**batch).sum(1)
        return many

    def _off(self, batch: int, slots: float) -> Forecast[float]:
        seconds = UNROLLED * self.target.of(float(bucket_of(batch)), slots) + _REPLAY_SECONDS
        return Forecast(float(UNROLLED * batch), seconds * self._factor_of_off(batch), seconds)

    def _all_of(
        self, cells: Cells, batch: int, drafting: int, slots: float, odds: tuple[float, ...], doubts: float
    ) -> Forecast[np.ndarray]:
        """All rows draft, whatever `drafting` and `odds` say."""
        mean, _, _ = self._gains(cells, doubts)
        drafts, seconds = self._passes.of(cells, bucket_of(batch), slots)
        corrected = self._corrected(cells, seconds, batch, doubts)
        # However slow rounds of "off" were: a check of more tokens takes no less, and the draft comes on top.
        corrected = np.maximum(corrected, self.off(batch, slots).seconds / UNROLLED + drafts)
        return Forecast(batch * mean, corrected, seconds)

    def _gains(self, cells: Cells, doubts: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of all plans the mean and the variance of the tokens that a row gains in a round, and the expected length of
        its draft: each ``[cells]``."""
        return self._once(("gains", cells, doubts), lambda: self._find_gains(cells, doubts))

    def _find_gains(self, cells: Cells, doubts: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        reach = self._reach(cells, doubts)
        sums = np.zeros((2, len(reach), MOST + 2))  # of tokens and of what they add to the square, one more than MOST
        np.cumsum(reach[:, 1:], axis=1, out=sums[0, :, 1:-1])
        np.cumsum(reach[:, 1:] * _SQUARES, axis=1, out=sums[1, :, 1:-1])
        if not cells.steps:
            where = cells.top_pair * (MOST + 2) + cells.top_length.astype(np.intp)
            mean, squares = 1.0 + sums.reshape(2, -1)[:, where]
            return mean, np.maximum(squares - mean * mean, 1e-6), cells.top_length
        line = np.empty(cells.length)
        line[: len(cells.ends) * len(LENGTHS)] = np.tile(_LENGTHS, len(cells.ends))
        for step, rounds in zip(cells.steps, self._passes.repeats(cells), strict=True):
            line[step.line] = rounds * (1.0 + _between(sums[:1], step.pair, line.take(step.below))[0])
        length = line.take(cells.at)
        mean, squares = 1.0 + _between(sums, cells.top_pair, length)
        return mean, np.maximum(squares - mean * mean, 1e-6), length


def _between(sums: np.ndarray, pair: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``[n, pairs, MOST + 2]`` at these pairs and lengths, which may lie between two whole ones: ``[n, cells]``."""
    length = np.minimum(length, float(MOST))
    whole = length.astype(np.intp)
    where, flat = whole + pair * (MOST + 2), sums.reshape(len(sums), -1)
    low = flat.take(where, axis=1)
    return low + (length - whole) * (flat.take(where + 1, axis=1) - low)


def _below(values: np.ndarray) -> np.ndarray:
    """The chance that a standard normal value is less, to .0002 (Bowling et al. 2009)."""
    return 1.0 / (1.0 + np.exp(np.clip(-values * (1.5976 + 0.070565992 * values * values), -80.0, 80.0)))
