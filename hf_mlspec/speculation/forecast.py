"""How many tokens does a round of a plan commit, and in how many seconds? By the equations in controller.py.

All lengths of the same levels are reckoned at once: a grid has one axis for each level that takes part, from the top
down, and along it the values of `LENGTHS`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from .costs import Numbers, PassCosts
from .estimates import Counted, PairEstimate, reach
from .plans import LENGTHS, Plan

TARGET = -1  # in the place of a level's index: who checks the first active level
_LOOKUP_SECONDS = 3e-5  # of a level without a model, for a row
_ROUND_SECONDS = 1.5e-4  # of a round beside its passes: lists of rows, callbacks, counts
_LEAD = 1.5  # tokens of a row that the first step of a draft feeds: the last one, and one that the check added
_FACTOR_WEIGHT, _FACTOR_WINDOW = 6.0, 64.0
_MOST_RATIO = 1e3  # measured over predicted seconds that a file may tell of; more is no measurement
_LIKE_ITS_TWIN = 12.0  # observations of a level that what it does with another view of the cache is worth
_AT = np.array(LENGTHS) - 1  # where the lengths are in a list by positions
_PLACE = {length: place for place, length in enumerate(LENGTHS)}
Found = TypeVar("Found")


@dataclass(frozen=True)
class LevelCosts:
    """What a controller is told of a level.

    costs: of its forward passes; None for a lookup. prior: the chance that a drafted token of this kind of level is
    kept. own_cache: it must read a row's tokens before it drafts. joined: it speaks the vocabulary of the level above.
    twin: the index of the same level where it sees another part of the cache (`plans.Choices`).
    """

    name: str
    costs: PassCosts | None
    prior: float
    own_cache: bool = True
    joined: bool = True
    twin: int | None = None


@dataclass
class Memory:
    """What was learned of a chain: the estimate of each pair of levels, and measured over predicted seconds of rounds.

    pairs: by the indices of who drafts and who checks. ratios: by active levels, and tokens and rows up to a factor of
    two; a ratio's `kept` is the sum of those observed. spare: seconds that may go to trials of other plans. credit: by
    active levels the seconds that were lost because no round of theirs was captured. capturing: seconds that may go to
    capturing rounds of trials.
    """

    pairs: dict[tuple[int, int], PairEstimate] = field(default_factory=dict)
    ratios: dict[tuple, Counted] = field(default_factory=dict)
    spare: float = 0.0
    credit: dict[tuple[int, ...], float] = field(default_factory=dict)
    capturing: float = 0.0

    def kept(self) -> Memory:
        """As the start of another call."""
        pairs, ratios = list(self.pairs.items()), list(self.ratios.items())  # another thread may have the memory
        remembered = {key: one.remembered() for key, one in pairs}
        copied = {key: replace(one) for key, one in ratios}
        return Memory(remembered, copied, self.spare, dict(self.credit), self.capturing)

    def to_dict(self) -> dict:
        """Chances and corrections in plain numbers, for JSON; what may be spent on trials is each process's own."""
        pairs, ratios = list(self.pairs.items()), []
        for (active, most, batch), one in list(self.ratios.items()):  # another thread may have the memory
            share = min(1.0, _FACTOR_WEIGHT / one.tried) if one.tried else 0.0  # the machine may have been busy
            ratios.append({"rounds": [list(active), most, batch], "counted": [one.tried * share, one.kept * share]})
        return {"pairs": [{"levels": list(key), **one.to_dict()} for key, one in pairs], "ratios": ratios}

    @classmethod
    def from_dict(cls, given: dict, levels: int) -> Memory:
        """What `to_dict` wrote of a chain of so many levels; ValueError for anything else."""
        memory = cls()
        try:
            for one in given["pairs"]:
                proposer, checker = (_index(at, levels) for at in one["levels"])
                memory.pairs[proposer, checker] = PairEstimate.from_dict(one)
            for one in given["ratios"]:
                active, most, batch = one["rounds"]
                key = tuple([_index(at, levels) for at in active]), int(most), int(batch)
                memory.ratios[key] = Counted(_FACTOR_WINDOW)
                memory.ratios[key].set(*map(float, one["counted"]), most=_MOST_RATIO)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is nothing that a controller learned: {error!r}") from error
        return memory

    def pair(self, levels: Sequence[LevelCosts], proposer: int, checker: int) -> PairEstimate:
        """The estimate of one level's drafts under another, or under the target. Of a pair never seen: where both
        are known under a third level, what that says; else the prior of the level's kind. A level with a draft window
        is thought to draft as it does without, until rounds have shown something else; of a level without one, what it
        does with it is the least."""
        found = self.pairs.get((proposer, checker))
        if found is not None:
            return found
        twin, prior = levels[proposer].twin, levels[proposer].prior
        twins = self.pairs.get((twin, checker if checker == TARGET else levels[checker].twin))
        if twins is not None and (twin < proposer or twins.mean > prior):  # those with the window come last
            return PairEstimate(twins.mean, _LIKE_ITS_TWIN)
        for middle in range(checker + 1, proposer):
            parts = [self.pairs.get(key) for key in ((proposer, middle), (middle, checker))]
            if all(part is not None and part.known for part in parts):
                prior = parts[0].mean * parts[1].mean
        return PairEstimate(prior)

    def observed(self, levels: Sequence[LevelCosts], proposer: int, checker: int) -> PairEstimate:
        """The estimate of a pair of which something is about to be observed; from now on it is kept."""
        return self.pairs.setdefault((proposer, checker), self.pair(levels, proposer, checker))

    def correct(self, plan: Plan, batch: int, ratio: float) -> None:
        """A round took `ratio` times what its costs say, without corrections."""
        key = _alike(plan.active, plan.most, batch)
        if key not in self.ratios:
            self.ratios[key] = Counted(_FACTOR_WINDOW)
        self.ratios[key].add(1, ratio)

    def factors(self, active: tuple[int, ...], lengths: Sequence[int], batch: int, hopeful: bool) -> list[float]:
        """Measured over predicted seconds, per length of the target's draft: of rounds alike, and before there are
        many, of rounds of other plans. hopeful: these may have been slow for a reason that rounds alike do not share.
        """
        if not self.ratios:
            return [1.0] * len(lengths)
        rows = batch.bit_length()
        same_rows = {key: one for key, one in self.ratios.items() if key[2] == rows} or self.ratios
        others = [one for key, one in same_rows.items() if key[0] == active] or list(same_rows.values())
        general = sum(one.kept for one in others) / sum(one.tried for one in others)
        general = min(general, 1.0) if hopeful else general
        alike = (self.ratios.get(_alike(active, length, batch)) for length in lengths)
        return [general if own is None else own.mean(general, _FACTOR_WEIGHT) for own in alike]


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


class Expectations:
    """Forecasts of all plans from what is known now.

    target, levels: their costs. memory: what was observed. doubts: how many standard deviations chances are taken
    above their mean. corrected: whether predicted seconds are corrected by measured ones.
    """

    def __init__(
        self, target: PassCosts, levels: Sequence[LevelCosts], memory: Memory, *, doubts: float, corrected: bool
    ):
        self.target, self.levels, self.memory = target, levels, memory
        self.doubts, self.corrected = doubts, corrected
        self._found: dict[Hashable, object] = {}

    def off(self, batch: int, slots: float) -> Forecast[float]:
        """A round of the target alone; a token attends to `slots` slots."""
        return self._once(("off", batch, slots), lambda: self._off(batch, slots))

    def grid(
        self, active: tuple[int, ...], batch: int, drafting: int, slots: float, odds: float = 1.0
    ) -> Forecast[np.ndarray]:
        """A round of `batch` rows, `drafting` of which draft, one or more, by all plans of these levels. odds: that
        tokens of those rows are kept, over those of all."""
        key = ("grid", active, batch, drafting, slots, odds)
        return self._once(key, lambda: self._grid(active, batch, drafting, slots, odds))

    def of(self, plan: Plan, batch: int, drafting: int, slots: float, odds: float = 1.0) -> Forecast[float]:
        """As `grid`, of one plan, in which nobody need draft."""
        if not plan.active or not drafting:
            return self.off(batch, slots)
        grid = self.grid(plan.active, batch, drafting, slots, odds)
        at = tuple(_PLACE[plan.lengths[index]] for index in plan.active)
        return Forecast(*(float(each[at]) for each in (grid.tokens, grid.seconds, grid.by_costs)))

    def of_limits(self, plan: Plan, limits: Sequence[int], odds: Sequence[float], slots: float) -> Forecast[float]:
        """A round in which row r drafts at most limits[r] tokens, the odds of which are odds[r] times those of all."""
        batch, drafting = len(limits), sum(limit > 0 for limit in limits)
        if not drafting:
            return self.off(batch, slots)
        top, whole = plan.active[0], self.of(plan, batch, drafting, slots)
        chances = self.memory.pair(self.levels, top, TARGET).chances()
        tokens = batch + sum(sum(reach(chances[:limit], own)) for limit, own in zip(limits, odds, strict=True))
        drafted = np.append(0.0, np.cumsum(self._chances_to_last(top, TARGET)))
        most, asked = drafting * drafted[plan.most], sum(drafted[limit] for limit in limits)
        saved = float(self.target.of(batch + most, slots) - self.target.of(batch + asked, slots))
        return Forecast(tokens, whole.seconds - saved * whole.seconds / whole.by_costs, whole.by_costs - saved)

    def of_a_token(self, plan: Plan, batch: int, slots: float) -> float:
        """Seconds that the last drafted token of a row costs: in the check, and in each level that drafts or checks it
        on the way."""
        top, at = plan.active[0], _PLACE[plan.most]
        drafted = self._tokens_drafted(top, TARGET)[at]
        seconds = _slope(self.target, batch, batch * (1.0 + drafted), slots)
        for index in plan.active:
            costs = self.levels[index].costs
            seconds += 0.0 if costs is None else _slope(costs, 1.0, batch, slots)
        return float(seconds * self._corrections(plan.active, batch)[at])

    def reading(self, active: Sequence[int], missing: Sequence[float], slots: float) -> float:
        """Seconds until these levels have read the tokens they lack, summed over rows, behind `slots` slots."""
        late = ((missing[index], self.levels[index]) for index in active if missing[index] >= 1)
        return sum(one.costs.of(count, slots) for count, one in late if one.own_cache and one.costs is not None)

    def _once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` gives, made where it is asked for first."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def _off(self, batch: int, slots: float) -> Forecast[float]:
        seconds = float(self.target.of(float(batch), slots)) + _ROUND_SECONDS
        # Slow rounds of other plans say nothing of "off": what is promised is to be no slower than it.
        (factor,) = self.memory.factors((), [0], batch, hopeful=True) if self.corrected else [1.0]
        return Forecast(float(batch), seconds * factor, seconds)

    def _grid(self, active: tuple[int, ...], batch: int, drafting: int, slots: float, odds: float) -> Forecast:
        drafted, drafts = self._drafting(active, TARGET, drafting, slots)
        axes = drafts.ndim
        tokens = along(batch + drafting * self._tokens_kept(active[0], TARGET, odds), axes)
        seconds = drafts + along(self.target.of(batch + drafting * drafted, slots), axes) + _ROUND_SECONDS
        corrected = seconds * along(self._corrections(active, batch), axes)
        # However slow rounds of "off" were: a check of more tokens takes no less, and the draft comes on top.
        corrected = np.maximum(corrected, self.off(batch, slots).seconds + drafts)
        return Forecast(np.broadcast_to(tokens, seconds.shape), corrected, seconds)

    def _drafting(
        self, active: Sequence[int], checker: int, rows: int, slots: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens of one row's draft, by its length, and a grid of the seconds of drafting for all rows."""
        index, *below = active
        drafted, costs = self._tokens_drafted(index, checker), self.levels[index].costs
        if costs is None:
            return drafted, np.full(drafted.shape, rows * _LOOKUP_SECONDS)
        if not below:
            return drafted, self._steps(index, checker, rows, slots)
        inner, seconds = self._drafting(below, index, rows, slots)
        each = 1.0 + self._tokens_kept(below[0], index)
        rounds = np.maximum(np.divide.outer(drafted, each), 1.0)
        round_ = seconds + along(costs.of(rows * (1.0 + inner), slots), seconds.ndim)
        return drafted, along(rounds, 1 + seconds.ndim) * round_

    def _steps(self, index: int, checker: int, rows: int, slots: float) -> np.ndarray:
        """Per length of a draft the seconds of making it token by token, for so many rows."""
        costs = self.levels[index].costs
        alive = rows * self._chances_to_last(index, checker)[:-1]
        steps = costs.of(np.maximum(alive, 1.0), slots) * np.minimum(alive, 1.0)
        return np.cumsum(np.append(costs.of(_LEAD * rows, slots), steps))[_AT]

    def _corrections(self, active: tuple[int, ...], batch: int) -> np.ndarray:
        """Per length of the target's draft measured over predicted seconds."""
        if not self.corrected:
            return np.ones(len(LENGTHS))
        return self._once(
            ("corrections", active, batch),
            lambda: np.array(self.memory.factors(active, LENGTHS, batch, hopeful=self.doubts > 0)),
        )

    def _tokens_drafted(self, proposer: int, checker: int) -> np.ndarray:
        """Per length of a draft the tokens that it is expected to have."""
        return np.cumsum(self._chances_to_last(proposer, checker))[_AT]

    def _tokens_kept(self, proposer: int, checker: int, odds: float = 1.0) -> np.ndarray:
        """Per length of a draft the tokens of it that are kept."""

        def kept() -> np.ndarray:
            pair = self.memory.pair(self.levels, proposer, checker)
            return np.cumsum(reach(pair.chances(self.doubts * pair.doubt), odds))[_AT]

        return self._once(("kept", proposer, checker, odds), kept)

    def _chances_to_last(self, proposer: int, checker: int) -> np.ndarray:
        """Per position the chance that a draft gets there."""
        pair = self.memory.pair(self.levels, proposer, checker)
        return self._once(("lasting", proposer, checker), lambda: np.array(pair.lengths()))


def along(values: np.ndarray, axes: int) -> np.ndarray:
    """Values by the lengths of the top levels, for a grid of so many axes."""
    return values.reshape(values.shape + (1,) * (axes - values.ndim))


def _slope(costs: PassCosts, few: float, many: float, slots: float) -> float:
    """Seconds of one token more, the mean between passes of few and of many."""
    return (costs.of(many, slots) - costs.of(few, slots)) / (many - few) if many > few else 0.0


def _alike(active: tuple[int, ...], most: int, batch: int) -> tuple:
    """Rounds that are corrected alike: of the same levels, and as many tokens and rows up to a factor of two."""
    return active, most.bit_length(), batch.bit_length()


def _index(at: int, levels: int) -> int:
    if type(at) is not int or not TARGET <= at < levels:
        raise ValueError(f"level {at!r} of {levels}")
    return at
