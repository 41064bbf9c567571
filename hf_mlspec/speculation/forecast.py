"""How many tokens does a round of a plan commit, and in how many seconds? By the equations in controller.py.

All plans of a chain are reckoned at once; `Cells` says where each stands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from .costs import Numbers, PassCosts
from .estimates import MOST, SURE, PairEstimate, reach
from .memory import LevelCosts, Memory
from .plans import LENGTHS, TARGET, Cells, Plan, cells_of

_SLACK, _SURPRISE = 0.1, 2.0  # of a round's expected seconds: that it may take longer, and in sum until that is news
_WORTH_CHOOSING = 4.0  # times the seconds of a choice: what is lost until one is made for it
JUMP = 100.0  # times the expected seconds of a round: more says that a clock has jumped, or the machine has slept
_LOOKUP_SECONDS = 3e-5  # of a level without a model, for a row
ROUND_SECONDS = 1.5e-4  # of a round beside its passes: lists of rows, callbacks, counts
_LEAD = 1.5  # tokens of a row that the first step of a draft feeds: the last one, and one that the check added
_AT = np.array(LENGTHS)  # where they are in a list by positions that begins with 0
# To mean tokens and to their mean square: token i of a draft makes the square (i + 1) squared.
_ADDS = np.array([[0.0] + [1.0] * (MOST + 1), [0.0] + [2.0 * i + 3.0 for i in range(MOST + 1)]])[:, None, None]
Found = TypeVar("Found")


@dataclass
class Forecast(Generic[Numbers]):
    """Expected tokens and seconds of a round of all rows: of one plan, or a grid of them. by_costs: the seconds before
    they are corrected."""

    tokens: Numbers
    seconds: Numbers
    by_costs: Numbers

    @property
    def speed(self) -> Numbers:
        """Tokens a second."""
        return self.tokens / self.seconds

    def slower(self, times: float) -> Forecast[Numbers]:
        """The same where rounds take so many times as long."""
        return Forecast(self.tokens, times * self.seconds, self.by_costs)

    def bringing(self, tokens: float) -> Forecast[Numbers]:
        """The same where a round commits so many tokens."""
        return Forecast(tokens, self.seconds, self.by_costs)

    def lost(self, before: float, tokens: int, seconds: float) -> float:
        """Seconds that rounds lost beyond what was expected for their tokens, after one more of so many."""
        return max(before + seconds - _SLACK * self.seconds - tokens / self.speed, 0.0)

    def may_take(self, seconds: float) -> bool:
        """Whether so many seconds are the time of a round, and not of a clock that jumps."""
        return 0.0 <= seconds <= JUMP * self.seconds

    def surprises(self, lost: float, choosing: float = 0.0) -> bool:
        """Whether the plan is to be questioned because so many were lost. choosing: seconds that this takes."""
        return lost > max(_SURPRISE * self.seconds, _WORTH_CHOOSING * choosing)


class Expectations:
    """Forecasts of all plans from what is known now.

    target, levels: their costs. memory: what was observed. corrected: whether predicted seconds are corrected by
    measured ones. Where chances are asked with doubts, each is so many standard deviations above its mean; doubts:
    those that will be asked for, which are reckoned together.
    """

    def __init__(
        self, target: PassCosts, levels: Sequence[LevelCosts], memory: Memory, *, corrected: bool,
        doubts: tuple[float, ...] = (0.0,),
    ):  # fmt: skip
        self.target, self.levels, self.memory, self.corrected = target, levels, memory, corrected
        self.doubts = doubts
        self._found: dict[Hashable, object] = {}
        self._rounds: dict[tuple, Forecast[np.ndarray]] = {}

    def off(self, batch: int, slots: float) -> Forecast[float]:
        """A round of the target alone; a token attends to `slots` slots."""
        return self._once(("off", batch, slots), lambda: self._off(batch, slots))

    def all_of(
        self, cells: Cells, batch: int, drafting: int, slots: float, odds: tuple[float, ...] = (), doubts: float = 0.0
    ) -> Forecast[np.ndarray]:
        """A round of `batch` rows, `drafting` of which draft, one or more, by every plan: ``[cells]``. odds: per pair
        under the target, that tokens of those rows are kept, over those of all; (): 1."""
        key = (cells, batch, drafting, slots, odds, doubts)
        found = self._rounds.get(key)
        if found is None:
            together = self.doubts if doubts in self.doubts and not odds else (doubts,)
            tokens, seconds, by_costs = self._all_of(*key[:-1], together)
            for place, one in enumerate(together):
                made = Forecast(tokens[place], seconds[place], by_costs if by_costs.ndim == 1 else by_costs[place])
                self._rounds[(*key[:-1], one)] = made
            found = self._rounds[key]
        return found

    def of(self, plan: Plan, batch: int, drafting: int, slots: float, odds: float = 1.0) -> Forecast[float]:
        """As `all_of`, of one plan, in which nobody need draft."""
        if not plan.active or not drafting:
            return self.off(batch, slots)
        key = ("of", plan.lengths, batch, drafting, slots, odds)
        return self._once(key, lambda: self._of(plan, batch, drafting, slots, odds))

    def _of(self, plan: Plan, batch: int, drafting: int, slots: float, odds: float) -> Forecast[float]:
        cells, found = self._known_of(plan.active, (batch, drafting, slots), odds)
        at = cells.place_of(plan)
        return Forecast(float(found.tokens[at]), float(found.seconds[at]), float(found.by_costs[at]))

    def of_limits(self, plan: Plan, limits: Sequence[int], odds: Sequence[float], slots: float) -> Forecast[float]:
        """A round in which row r drafts at most limits[r] tokens, the odds of which are odds[r] times those of all."""
        batch, drafting = len(limits), sum(limit > 0 for limit in limits)
        if not drafting:
            return self.off(batch, slots)
        top, whole = plan.active[0], self.of(plan, batch, drafting, slots)
        chances = self.chances(top, TARGET)
        tokens = batch + sum(sum(reach(chances[:limit], own)) for limit, own in zip(limits, odds, strict=True))
        if all(limit in (0, plan.most) for limit in limits):
            return Forecast(tokens, whole.seconds, whole.by_costs)
        drafted = [0.0, *accumulate(self._pair(top, TARGET).lengths())]
        most, asked = drafting * drafted[plan.most], sum(drafted[limit] for limit in limits)
        saved = self.target.of(batch + most, slots) - self.target.of(batch + asked, slots)
        return Forecast(tokens, whole.seconds - saved * whole.seconds / whole.by_costs, whole.by_costs - saved)

    def of_a_token(self, plan: Plan, batch: int, slots: float) -> float:
        """Seconds that the last drafted token of a row costs: in the check, and in each level that drafts or checks it
        on the way."""
        top, at = plan.active[0], LENGTHS.index(plan.most)
        drafted = sum(self._pair(top, TARGET).lengths()[: plan.most])
        seconds = _slope(self.target, batch, batch * (1.0 + drafted), slots)
        for index in plan.active:
            costs = self.levels[index].costs
            seconds += 0.0 if costs is None else _slope(costs, 1.0, batch, slots)
        corrected = self.corrected and self.memory.ratios
        return seconds * self.memory.factors([plan.active], batch)[0][0][at] if corrected else seconds

    def reading(self, index: int, missing: float, slots: float) -> float:
        """Seconds until this level has read so many tokens that it lacks, summed over rows, behind `slots` slots."""
        level = self.levels[index]
        if missing < 1 or not level.own_cache or level.costs is None:
            return 0.0
        return self._once(("reading", index, missing, slots), lambda: level.costs.of(missing, slots))

    def chances(self, proposer: int, checker: int) -> list[float]:
        """Per position the chance that a token of a pair is kept if those before were, without doubts."""
        return self._once(("chances", proposer, checker), lambda: self._pair(proposer, checker).chances())

    def mean(self, proposer: int, checker: int) -> float:
        """The chance that a token of a pair is kept, whatever its position."""
        return self._pair(proposer, checker).mean

    def _once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` gives, made where it is asked for first."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = make()
        return found

    def _pair(self, proposer: int, checker: int) -> PairEstimate:
        return self._once(("pair", proposer, checker), lambda: self.memory.pair(self.levels, proposer, checker))

    def _known_of(
        self, active: tuple[int, ...], like: tuple[int, int, float], odds: float
    ) -> tuple[Cells, Forecast[np.ndarray]]:
        """Forecasts with these levels, of all plans where they were made before."""
        for (cells, *rows, own, doubts), found in self._rounds.items():
            if tuple(rows) == like and not doubts and active in cells.start_of:
                at = cells.pair_at[active[0], TARGET]
                if (own[at] if own else 1.0) == odds:
                    return cells, found
        cells = cells_of((active,), len(self.levels))
        return cells, self.all_of(cells, *like, () if odds == 1.0 else (odds,))

    def _off(self, batch: int, slots: float) -> Forecast[float]:
        seconds = self.target.of(float(batch), slots) + ROUND_SECONDS
        return Forecast(float(batch), seconds * self._factor_of_off(batch), seconds)

    def _factor_of_off(self, batch: int) -> float:
        return self.memory.factor_of_off(batch) if self.corrected else 1.0

    def _all_of(
        self, cells: Cells, batch: int, drafting: int, slots: float, odds: tuple[float, ...], doubts: tuple[float, ...]
    ) -> tuple[np.ndarray, ...]:
        """Tokens, seconds and those by costs: ``[doubts, cells]``."""
        kept = self._kept(cells, doubts)[0].take(_AT, -1)
        drafts = self._drafting(cells, kept, drafting, slots)
        drafts = drafts.take(cells.at, -1) if cells.steps else drafts
        kept = self._kept(cells, doubts, odds)[0].take(_AT, -1) if odds else kept[:, : cells.tops]
        tokens = (batch + drafting * kept).reshape(len(doubts), -1).take(cells.top, -1)
        check = self.target.of(batch + drafting * self._drafted(cells)[: cells.tops], slots)
        seconds = drafts + (check + ROUND_SECONDS).take(cells.top)
        # However slow rounds of "off" were: a check of more tokens takes no less, and the draft comes on top.
        corrected = np.maximum(self._corrected(cells, seconds, batch, doubts), self.off(batch, slots).seconds + drafts)
        return tokens, corrected, seconds

    def _corrected(self, cells: Cells, seconds: np.ndarray, batch: int, doubts: tuple[float, ...]) -> np.ndarray:
        """Predicted seconds of all plans, by what rounds like theirs have taken: ``[doubts, cells]``."""
        if not self.corrected or not self.memory.ratios:
            return seconds if seconds.ndim > 1 else seconds[None].repeat(len(doubts), 0)
        usual, hopeful = self.memory.factors(cells.choices, batch)
        factors = np.array([hopeful if one else usual for one in doubts])
        return seconds * factors.reshape(len(doubts), -1).take(cells.of_choice, -1)

    def _reach(self, cells: Cells, doubts: tuple[float, ...], odds: tuple[float, ...] = ()) -> np.ndarray:
        """Per pair and position the chance that all tokens up to it are kept, that of none in front and of more than
        MOST behind: ``[doubts, pairs, 2 + MOST]``. odds: of tokens of the pairs under the target, which alone are then
        told of."""

        def found() -> np.ndarray:
            pairs = cells.pairs[: cells.tops] if odds else cells.pairs
            one = np.array([[1.0, *self.chances(*pair), 0.0] for pair in pairs])
            chances = np.array([one] * len(doubts))
            for place, above in enumerate(doubts):
                if above:
                    more = np.array([[above * self._pair(*pair).doubt] for pair in pairs])
                    np.minimum(one[:, 1:-1] + more, SURE, out=chances[place, :, 1:-1])
            if odds:
                own, all_ = chances[..., 1:-1], np.array(odds)[:, None]
                changed = np.minimum(own * all_ / (1.0 - own + own * all_), SURE)
                chances[..., 1:-1] = np.where(all_ == 1.0, own, changed)
            return np.multiply.accumulate(chances, axis=-1)

        return self._once(("reach", cells, doubts, odds), found)

    def _kept(self, cells: Cells, doubts: tuple[float, ...], odds: tuple[float, ...] = ()) -> np.ndarray:
        """By the length of a draft what is kept of it, its mean tokens and what they add to the mean square of those
        that a round brings: ``[2, doubts, pairs, 2 + MOST]``."""
        key = ("kept", cells, doubts, odds)
        return self._once(key, lambda: (self._reach(cells, doubts, odds) * _ADDS).cumsum(-1))

    def _lasting(self, cells: Cells) -> np.ndarray:
        """Per pair and position the chance that a draft gets there: ``[pairs, MOST]``."""
        return self._once(("lasting", cells), lambda: np.array([self._pair(*pair).lengths() for pair in cells.pairs]))

    def _drafted(self, cells: Cells) -> np.ndarray:
        """Per pair and length of a draft the tokens that it is expected to have."""
        return self._once(("drafted", cells), lambda: self._lasting(cells).cumsum(1)[:, _AT - 1])

    def _drafting(self, cells: Cells, kept: np.ndarray, rows: int, slots: float) -> np.ndarray:
        """Seconds of drafting for so many rows: ``[doubts, line]``, or where they do not depend on what is kept of the
        tokens, ``[cells]``. kept: ``[doubts, pairs, lengths]``."""
        alone, checks = self._once(("rows", cells, rows, slots), lambda: self._of_rows(cells, rows, slots))
        if not cells.steps:
            return alone.take(cells.at)
        line, drafted = np.empty((len(kept), cells.length)), self._drafted(cells)
        line[:, : len(alone)] = alone
        each = 1.0 + kept.reshape(len(kept), -1)
        for step in cells.steps:
            rounds = np.maximum(drafted.take(step.own) / each.take(step.inner, -1), 1.0)
            line[:, step.line] = rounds * (line.take(step.below, -1) + checks.take(step.inner))
        return line

    def _of_rows(self, cells: Cells, rows: int, slots: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of drafting token by token: ``[ends, lengths]`` in one line; and per pair those of the pass by which
        its checker judges a draft of each length. Nothing of it depends on what is kept."""
        alive = rows * self._lasting(cells)[cells.ends, :-1]
        tokens = np.concatenate([np.full((len(alive), 1), _LEAD * rows), np.maximum(alive, 1.0)], 1)
        seconds = np.full((len(alive), len(LENGTHS)), rows * _LOOKUP_SECONDS)
        for place, pair in enumerate(cells.ends):
            costs = self.levels[cells.pairs[pair][0]].costs
            if costs is not None:
                steps = costs.of(tokens[place], slots)
                steps[1:] *= np.minimum(alive[place], 1.0)
                seconds[place] = steps.cumsum()[_AT - 1]
        checks, judged = np.zeros((len(cells.pairs), len(LENGTHS))), rows * (1.0 + self._drafted(cells))
        for judge, where in cells.under.items():
            checks[where] = self.levels[judge].costs.of(judged[where], slots)
        return seconds.ravel(), checks


def _slope(costs: PassCosts, few: float, many: float, slots: float) -> float:
    """Seconds of one token more, the mean between passes of few and of many."""
    return (costs.of(many, slots) - costs.of(few, slots)) / (many - few) if many > few else 0.0
