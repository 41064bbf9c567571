"""How many drafted tokens will the next check keep? Estimates per level, position and row, from the rounds so far.

Of a pair, a level that drafts and one that checks it, two chances are counted for every position i of a draft: that
it is reached (i tokens are drafted where i - 1 were, as a draft may end early), and that it is kept (i tokens are
accepted where i - 1 were). The second includes the first. Counts are smoothed towards the position before (where
much was kept the text is easy), the first one's towards the pair's mean, the mean towards a prior (a beta
distribution's mean with a weight in observations), and a row's own mean towards the pair's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

MOST = 16  # positions that are told apart
_WINDOW = 256.0  # observations of a pair that count; older ones fade
_ROW_WINDOW = 24.0
_PRIOR_WEIGHT = 4.0
_POSITION_WEIGHT = 4.0
_ROW_WEIGHT = 8.0
_SHIFTS = 1.25  # factor between the chances of the rows that stay and of all, from where on it is no chance
_REMEMBERED = 12.0  # observations that an earlier call's estimate is worth
SURE = 0.995  # no chance is larger: a draft of any length would be free of doubt


@dataclass
class Counted:
    """Trials and successes, of which old ones fade where there are more than `window`."""

    window: float
    tried: float = 0.0
    kept: float = 0.0

    def add(self, tried: int, kept: int) -> None:
        """So many trials, so many of them successes."""
        if self.tried + tried > self.window:
            share = max(self.window - tried, 0.0) / self.tried if self.tried else 0.0
            self.tried, self.kept = self.tried * share, self.kept * share
        self.tried += tried
        self.kept += kept
        if self.tried > self.window:
            self.fade(self.window / self.tried)

    def fade(self, share: float) -> None:
        """What was counted is worth so much less."""
        self.tried, self.kept = share * self.tried, share * self.kept

    def mean(self, prior: float, weight: float) -> float:
        """The chance of success, with a prior worth `weight` trials."""
        return (self.kept + weight * prior) / (self.tried + weight)

    def set(self, tried: float, kept: float, most: float = 1.0) -> None:
        """What was counted elsewhere; ValueError unless a trial's mean is 0 to `most`."""
        if not (math.isfinite(tried) and 0 <= tried <= self.window and 0 <= kept <= most * tried):
            raise ValueError(f"{kept!r} of {tried!r} trials")
        self.tried, self.kept = tried, kept


def _positions() -> list[Counted]:
    return [Counted(_WINDOW) for _ in range(MOST)]


@dataclass
class PairEstimate:
    """What is known of one level's drafts under one checker.

    prior: the chance that a drafted token is kept, before anything is known. prior_weight: what it is worth, in
    observed tokens.
    """

    prior: float
    prior_weight: float = _PRIOR_WEIGHT
    total: Counted = field(default_factory=lambda: Counted(_WINDOW))
    kept: list[Counted] = field(default_factory=_positions)
    reached: list[Counted] = field(default_factory=_positions)
    idle: float = 0.0  # tokens committed since the last observation

    def observe(self, limit: int, drafted: int, accepted: int) -> tuple[int, int]:
        """One row of one check: what was asked for, drafted and accepted; -> trials and successes."""
        limit = min(limit, MOST)
        accepted, drafted = min(accepted, limit), min(drafted, limit)
        tried = min(accepted + 1, limit)
        _extend(self.kept, tried, accepted)
        _extend(self.reached, min(drafted + 1, limit), drafted)
        self.total.add(tried, accepted)
        self.idle = 0.0
        return tried, accepted

    def observe_all(self, checks: Sequence[tuple[int, int, int, int]], since: float) -> tuple[int, int]:
        """As `observe` of many checks, each with how often it came; since: tokens committed behind the last one."""
        tried_to, kept_to, asked_to, drafted_to = ([0] * (MOST + 1) for _ in range(4))
        tries = successes = 0
        for limit, drafted, accepted, times in checks:
            limit = min(limit, MOST)
            accepted, drafted = min(accepted, limit), min(drafted, limit)
            tried = min(accepted + 1, limit)
            tried_to[tried] += times
            kept_to[accepted] += times
            asked_to[min(drafted + 1, limit)] += times
            drafted_to[drafted] += times
            tries, successes = tries + times * tried, successes + times * accepted
        _add_behind(self.kept, tried_to, kept_to)
        _add_behind(self.reached, asked_to, drafted_to)
        self.total.add(tries, successes)
        self.idle = since
        return tries, successes

    @property
    def mean(self) -> float:
        """The chance that a drafted token is kept, whatever its position."""
        return self.total.mean(self.prior, self.prior_weight)

    @property
    def doubt(self) -> float:
        """One standard deviation of `mean`; it grows while nothing is observed."""
        known = (self.total.tried + self.prior_weight) / (1.0 + self.idle / _WINDOW)
        return math.sqrt(self.mean * (1.0 - self.mean) / (known + 1.0))

    def chances(self, above: float = 0.0) -> list[float]:
        """Per position the chance that its token is kept if those before were; above: added to each."""
        found, chance, half = [], (mean := self.mean), 0.5 * _POSITION_WEIGHT
        for one in self.kept:
            chance = (one.kept + half * (chance + mean)) / (one.tried + _POSITION_WEIGHT)
            found.append(chance + above if chance + above < SURE else SURE)
        return found

    def lengths(self) -> list[float]:
        """Per position the chance that a draft gets that far."""
        return list(accumulate((one.mean(1.0, 1.0) for one in self.reached), mul))

    def shift(self, ratio: float) -> None:
        """From now on so many times as many tokens are kept, as other rows decode; small differences are chance."""
        if 1.0 / _SHIFTS < ratio < _SHIFTS:
            return
        for one in (self.total, *self.kept):
            one.kept = min(one.kept * ratio, one.tried)

    @property
    def known(self) -> bool:
        """Whether anything was observed, be it in an earlier call."""
        return self.total.tried > 0 or self.prior_weight > _PRIOR_WEIGHT

    def remembered(self) -> PairEstimate:
        """The estimate as the prior of another call."""
        weight = min(self.total.tried + self.prior_weight, _REMEMBERED)
        new = PairEstimate(self.mean, weight)
        for old, own in ((self.kept, new.kept), (self.reached, new.reached)):
            for source, copy in zip(old, own, strict=True):
                share = min(1.0, _REMEMBERED / source.tried) if source.tried else 0.0
                copy.tried, copy.kept = source.tried * share, source.kept * share
        return new

    def to_dict(self) -> dict:
        """Plain numbers, for JSON: what `remembered` keeps."""
        kept = self.remembered()
        lines = {"kept": kept.kept, "reached": kept.reached}
        told = {name: [[one.tried, one.kept] for one in line] for name, line in lines.items()}
        return {"mean": kept.prior, "weight": kept.prior_weight, **told}

    @classmethod
    def from_dict(cls, given: dict) -> PairEstimate:
        """What `to_dict` wrote, as the prior of another call; ValueError, KeyError or TypeError for anything else."""
        mean, weight = float(given["mean"]), float(given["weight"])
        if not (0 <= mean <= 1 and 0 < weight <= _REMEMBERED):
            raise ValueError(f"mean {mean}, weight {weight}")
        found = cls(mean, weight)
        for line, own in ((given["kept"], found.kept), (given["reached"], found.reached)):
            for (tried, kept), one in zip(line, own, strict=True):
                one.set(float(tried), float(kept))
        return found


def _extend(line: list[Counted], tried: int, kept: int) -> None:
    """One trial of each of the first positions, of which `kept` succeed: as `Counted.add`, of which calls take longest
    of all that is counted in a round."""
    for i in range(tried):
        one = line[i]
        if one.tried + 1.0 > _WINDOW:
            one.fade((_WINDOW - 1.0) / one.tried)
        one.tried += 1.0
        if i < kept:
            one.kept += 1.0


def _add_behind(line: list[Counted], tried_to: list[int], kept_to: list[int]) -> None:
    """Per position the drafts that got beyond it; given: by how many positions were tried, and kept, how many."""
    tried = kept = 0
    for i in range(MOST - 1, -1, -1):
        tried, kept = tried + tried_to[i + 1], kept + kept_to[i + 1]
        if tried:
            line[i].add(tried, kept)


def reach(chances: Sequence[float], odds: float = 1.0) -> list[float]:
    """Per position the chance that all tokens up to it are kept, the odds of each chance times `odds`."""
    if odds != 1.0:
        chances = [min(chance * odds / (1.0 - chance + chance * odds), SURE) for chance in chances]
    return list(accumulate(chances, mul))


def odds_ratio(own: float, mean: float) -> float:
    """The odds of one chance over those of another, to two digits: a factor that leads to no chance above 1."""
    own, mean = (min(max(chance, 1.0 - SURE), SURE) for chance in (own, mean))
    return float(f"{own * (1.0 - mean) / (mean * (1.0 - own)):.2g}")


class RowEstimates:
    """How each row differs from the mean of its pair, and the tokens it has gained; kept in step with the rows of the
    loop."""

    def __init__(self) -> None:
        self.rows: list[Counted] = []
        self.gained: list[int] = []

    def start(self, count: int) -> None:
        """Forget all rows; so many follow."""
        self.rows, self.gained = [], []
        self.admit(count)

    def select(self, keep: list[int]) -> None:
        """Go on with the rows of these indices."""
        self.rows, self.gained = ([line[r] for r in keep] for line in (self.rows, self.gained))

    def admit(self, count: int) -> None:
        """Append so many rows that nothing is known of."""
        self.rows += [Counted(_ROW_WINDOW) for _ in range(count)]
        self.gained += [0] * count

    def replace(self, row: int) -> None:
        """Another row takes the place of row `row`."""
        self.rows[row], self.gained[row] = Counted(_ROW_WINDOW), 0

    def gain(self, accepted: Sequence[int]) -> None:
        """A round has committed so many drafted tokens of every row, and one more."""
        self.gained = [have + a + 1 for have, a in zip(self.gained, accepted, strict=True)]

    def share_of(self, keep: Sequence[int], mean: float) -> float:
        """Chances of some rows over those of all."""
        means = [self.mean(r, mean) for r in range(len(self.rows))]
        return sum(means[r] for r in keep) * len(means) / (len(keep) * sum(means)) if keep and any(means) else 1.0

    def mean(self, row: int, mean: float) -> float:
        """The chance that a token drafted for this row is kept; mean: of its pair."""
        return self.rows[row].mean(mean, _ROW_WEIGHT)
