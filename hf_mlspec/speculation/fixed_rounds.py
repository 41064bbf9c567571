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

from .costs import PassCosts
from .estimates import MOST
from .forecast import Expectations, Forecast
from .memory import LevelCosts, Memory
from .plans import LENGTHS, Cells, Plan
from .rounds.chain import bucket_of
from .rounds.program import MOST_PASSES, UNROLLED

_REPLAY_SECONDS = 6e-5  # of a round beside its passes: the report is read, the next round is launched
_LOOKUP_SECONDS = 1e-5  # of a level without a model, for all rows
_COUNTED = np.arange(1.0, 13.0)  # rounds of other plans that are counted one by one
_MOST_COUNTED = _COUNTED[-1] / 2  # expected rounds
_LENGTHS = np.array(LENGTHS, float)
_LARGEST = (0.0, 0.56, 1.03, 1.42, 1.77, 2.07, 2.34)  # of 1, 2, 4 ... 64 standard normal values, the mean
_APART = 1024.0  # slots between the two points of a line


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


@lru_cache(maxsize=8)
def passes_of(target: PassCosts, levels: tuple[LevelCosts, ...]) -> Passes:
    """One object for these costs, as every call has a controller of its own."""
    return Passes(target, levels)


class FixedExpectations(Expectations):
    """Forecasts of rounds that do the same work whatever is accepted. passes: those of target and levels."""

    def __init__(
        self, target: PassCosts, levels: Sequence[LevelCosts], memory: Memory, *, corrected: bool,
        passes: Passes | None = None, doubts: tuple[float, ...] = (0.0,),
    ):  # fmt: skip
        super().__init__(target, levels, memory, corrected=corrected, doubts=doubts)
        self._passes = passes or passes_of(target, tuple(levels))

    def of_limits(self, plan: Plan, limits: Sequence[int], odds: Sequence[float], slots: float) -> Forecast[float]:
        """All rows draft as much as the plan says."""
        return self.of(plan, len(limits), len(limits), slots)

    def rounds(self, cells: Cells, batch: int, left: float, room: float, doubts: float = 0.0) -> np.ndarray:
        """Rounds by all plans until every row has gained `left` tokens of the `room` that it may: ``[cells]``."""
        together = self.doubts if doubts in self.doubts else (doubts,)
        found = self._once(("rounds", cells, batch, left, room, together),
                           lambda: self._counted(cells, batch, left, room, together))  # fmt: skip
        return found[together.index(doubts)]

    def _counted(self, cells: Cells, batch: int, left: float, room: float, doubts: tuple[float, ...]) -> np.ndarray:
        mean, length, many = self._gains(cells, doubts), None, 0.0
        if batch > 1:
            largest = np.interp(math.log2(batch), np.arange(len(_LARGEST)), _LARGEST)
            many = largest * np.sqrt(self._variance(cells, doubts) / (mean * room))
        many = left / mean * (1.0 + many)
        if many.min() > _MOST_COUNTED:
            return many
        few = np.nonzero(many <= _MOST_COUNTED)
        behind = np.multiply.outer(mean[few], _COUNTED) - (left - 0.5)
        done = _below(behind / np.sqrt(np.multiply.outer(self._variance(cells, doubts)[few], _COUNTED)))
        wanted = math.ceil(left) - 1  # of a draft, where the first round is to be the last
        done[:, 0] = 0.0
        if wanted <= MOST:
            length = np.broadcast_to(self._lengths(cells, doubts), many.shape)[few]
            all_kept = self._reach(cells, doubts)[..., wanted].take(cells.top_pair, -1)[few]
            done[:, 0] = np.where(length >= wanted, all_kept, 0.0)
        many[few] = 1.0 + len(_COUNTED) - (done if batch == 1 else done**batch).sum(1)
        return many

    def _off(self, batch: int, slots: float) -> Forecast[float]:
        seconds = UNROLLED * self.target.of(float(bucket_of(batch)), slots) + _REPLAY_SECONDS
        return Forecast(float(UNROLLED * batch), seconds * self._factor_of_off(batch), seconds)

    def _all_of(
        self, cells: Cells, batch: int, drafting: int, slots: float, odds: tuple[float, ...], doubts: tuple[float, ...]
    ) -> tuple[np.ndarray, ...]:
        """All rows draft, whatever `drafting` and `odds` say."""
        drafts, seconds = self._passes.of(cells, bucket_of(batch), slots)
        corrected = self._corrected(cells, seconds, batch, doubts)
        # However slow rounds of "off" were: a check of more tokens takes no less, and the draft comes on top.
        corrected = np.maximum(corrected, self.off(batch, slots).seconds / UNROLLED + drafts)
        return batch * self._gains(cells, doubts), corrected, seconds

    def _gains(self, cells: Cells, doubts: tuple[float, ...]) -> np.ndarray:
        """Of all plans the mean tokens that a row gains in a round: ``[doubts, cells]``."""
        return self._once(("gains", cells, doubts), lambda: 1.0 + self._by_length(cells, doubts, 0))

    def _variance(self, cells: Cells, doubts: tuple[float, ...]) -> np.ndarray:
        """Of the tokens that a row gains in a round: ``[doubts, cells]``."""
        mean = self._gains(cells, doubts)
        return np.maximum(1.0 + self._by_length(cells, doubts, 1) - mean * mean, 1e-6)

    def _by_length(self, cells: Cells, doubts: tuple[float, ...], which: int) -> np.ndarray:
        """`_kept` at the expected lengths of the drafts."""
        sums = self._kept(cells, doubts)[which]
        if not cells.steps:
            return sums.reshape(len(doubts), -1).take(cells.top_at, -1)
        return _between(sums, cells.top_pair, self._lengths(cells, doubts))

    def _lengths(self, cells: Cells, doubts: tuple[float, ...]) -> np.ndarray:
        """Expected length of the draft of all plans: ``[doubts, cells]``, or ``[cells]`` without levels in the middle.
        """
        return self._once(("lengths", cells, doubts), lambda: self._find_lengths(cells, doubts))

    def _find_lengths(self, cells: Cells, doubts: tuple[float, ...]) -> np.ndarray:
        if not cells.steps:
            return cells.top_length
        sums, line = self._kept(cells, doubts)[0], np.empty((len(doubts), cells.length))
        line[:, : len(cells.ends) * len(LENGTHS)] = np.tile(_LENGTHS, len(cells.ends))
        for step, rounds in zip(cells.steps, self._passes.repeats(cells), strict=True):
            line[:, step.line] = rounds * (1.0 + _between(sums, step.pair, line.take(step.below, -1)))
        return line.take(cells.at, -1)


def _between(sums: np.ndarray, pair: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``[doubts, pairs, 2 + MOST]`` at the pair of each cell and these lengths, ``[doubts, cells]``, which may lie
    between two whole ones."""
    length = np.minimum(length, float(MOST))
    whole = length.astype(np.intp)
    where = whole + (pair * (2 + MOST) + np.arange(len(sums))[:, None] * sums[0].size)
    low = sums.take(where)
    return low + (length - whole) * (sums.take(where + 1) - low)


def _below(values: np.ndarray) -> np.ndarray:
    """The chance that a standard normal value is less, to .0002 (Bowling et al. 2009)."""
    return 1.0 / (1.0 + np.exp(np.clip(-values * (1.5976 + 0.070565992 * values * values), -80.0, 80.0)))
