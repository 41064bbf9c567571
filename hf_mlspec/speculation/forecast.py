"""How many tokens does a round of a plan commit, and in how many seconds? By the equations in controller.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .costs import PassCosts
from .estimates import Counted, PairEstimate, reach
from .plans import Plan

TARGET = -1  # in the place of a level's index: who checks the first active level
_LOOKUP_SECONDS = 3e-5  # of a level without a model, for a row
_LEAD = 1.5  # tokens of a row that the first step of a draft feeds: the last one, and one that the check added
_FACTOR_WEIGHT, _FACTOR_WINDOW = 6.0, 64.0


@dataclass(frozen=True)
class LevelCosts:
    """What a controller is told of a level.

    costs: of its forward passes; None for a lookup. prior: the chance that a drafted token of this kind of level is
    kept. own_cache: it must read a row's tokens before it drafts. joined: it speaks the vocabulary of the level above.
    """

    name: str
    costs: PassCosts | None
    prior: float
    own_cache: bool = True
    joined: bool = True


@dataclass
class Memory:
    """What was learned of a chain: the estimate of each pair of levels, and measured over predicted seconds of rounds.

    pairs: by the indices of who drafts and who checks. ratios: by active levels, and tokens and rows up to a factor of
    two; a ratio's `kept` is the sum of those observed.
    """

    pairs: dict[tuple[int, int], PairEstimate] = field(default_factory=dict)
    ratios: dict[tuple, Counted] = field(default_factory=dict)

    def kept(self) -> Memory:
        """As the start of another call."""
        return Memory({key: pair.remembered() for key, pair in self.pairs.items()}, self.ratios)

    def pair(self, levels: Sequence[LevelCosts], proposer: int, checker: int) -> PairEstimate:
        """The estimate of one level's drafts under another, or under the target. Of a pair never seen: where both
        are known under a third level, what that says; else the prior of the level's kind."""
        found = self.pairs.get((proposer, checker))
        if found is None:
            prior = levels[proposer].prior
            for middle in range(checker + 1, proposer):
                parts = [self.pairs.get(key) for key in ((proposer, middle), (middle, checker))]
                if all(part is not None and part.total.tried > 0 for part in parts):
                    prior = parts[0].mean * parts[1].mean
            found = self.pairs[proposer, checker] = PairEstimate(prior)
        return found

    def correct(self, plan: Plan, batch: int, ratio: float) -> None:
        """A round took `ratio` times what its costs say, without corrections."""
        self.ratios.setdefault(_alike(plan, batch), Counted(_FACTOR_WINDOW)).add(1, ratio)

    def factor(self, plan: Plan, batch: int, hopeful: bool = False) -> float:
        """Measured over predicted seconds: of rounds alike, and before there are many, of rounds of other plans.
        hopeful: these may have been slow for a reason that rounds alike do not share."""
        if not self.ratios:
            return 1.0
        own, rows = self.ratios.get(_alike(plan, batch)), batch.bit_length()
        same_rows = {key: one for key, one in self.ratios.items() if key[2] == rows} or self.ratios
        others = [one for key, one in same_rows.items() if key[0] == plan.active] or list(same_rows.values())
        general = sum(one.kept for one in others) / sum(one.tried for one in others)
        general = min(general, 1.0) if hopeful else general
        return general if own is None else own.mean(general, _FACTOR_WEIGHT)


@dataclass
class Forecast:
    """Expected tokens and seconds of a round of all rows. by_costs: the seconds before they are corrected."""

    tokens: float
    seconds: float
    by_costs: float

    @property
    def speed(self) -> float:
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
        self._kept: dict[tuple[int, int, float], list[float]] = {}
        self._lasting: dict[tuple[int, int], list[float]] = {}
        self._drafted: dict[tuple[int, int], list[float]] = {}
        self._seconds: dict[tuple, list[float]] = {}
        self._corrections: dict[tuple, float] = {}

    def of(self, plan: Plan, batch: int, drafting: int, slots: float, factor: float = 1.0) -> Forecast:
        """A round of `batch` rows, `drafting` of which draft; a token attends to `slots` slots. factor: chances of
        those rows over the mean of all."""
        tokens, seconds, drafted = float(batch), 0.0, 0.0
        if plan.active and drafting:
            top = plan.active[0]
            drafted, seconds = self._drafting(plan, plan.active, TARGET, drafting, slots)
            tokens += drafting * self._tokens_kept(top, TARGET, factor)[plan.lengths[top] - 1]
        seconds += self.target.of(batch + drafting * drafted, slots)
        return Forecast(tokens, seconds * self._correction(plan, batch), seconds)

    def of_a_token(self, plan: Plan, batch: int, slots: float) -> float:
        """Seconds that the last drafted token of a row costs: in the check, and in each level that drafts or checks it
        on the way."""
        top = plan.active[0]
        drafted = self._tokens_drafted(top, TARGET)[plan.lengths[top] - 1]
        seconds = _slope(self.target, batch, batch * (1.0 + drafted), slots)
        for index in plan.active:
            costs = self.levels[index].costs
            seconds += 0.0 if costs is None else _slope(costs, 1.0, batch, slots)
        return seconds * self._correction(plan, batch)

    def reading(self, plan: Plan, missing: Sequence[float], slots: float) -> float:
        """Seconds until the plan's levels have read the tokens they lack, summed over rows, behind `slots` slots."""
        return sum(
            self.levels[index].costs.of(missing[index], slots)
            for index in plan.active
            if missing[index] >= 1 and self.levels[index].own_cache and self.levels[index].costs is not None
        )

    def _drafting(
        self, plan: Plan, active: Sequence[int], checker: int, rows: int, slots: float
    ) -> tuple[float, float]:
        """Expected tokens of one row's draft, and the seconds of drafting for all rows."""
        index, *below = active
        length, level = plan.lengths[index], self.levels[index]
        drafted = self._tokens_drafted(index, checker)[length - 1]
        if level.costs is None:
            return drafted, rows * _LOOKUP_SECONDS
        if not below:
            return drafted, self._steps(index, checker, rows, slots)[length - 1]
        inner, seconds = self._drafting(plan, below, index, rows, slots)
        each = 1.0 + self._tokens_kept(below[0], index)[plan.lengths[below[0]] - 1]
        rounds = max(drafted / each, 1.0)
        return drafted, rounds * (seconds + level.costs.of(rows * (1.0 + inner), slots))

    def _steps(self, index: int, checker: int, rows: int, slots: float) -> list[float]:
        """Per length of a draft the seconds of making it token by token, for so many rows."""
        found = self._seconds.get((index, checker, rows, slots))
        if found is None:
            costs = self.levels[index].costs
            alive = (rows * chance for chance in self._chances_to_last(index, checker)[:-1])
            steps = (costs.of(max(n, 1.0), slots) * min(n, 1.0) for n in alive)
            found = list(accumulate(steps, initial=costs.of(_LEAD * rows, slots)))
            self._seconds[index, checker, rows, slots] = found
        return found

    def _correction(self, plan: Plan, batch: int) -> float:
        if not self.corrected:
            return 1.0
        key = _alike(plan, batch)
        if key not in self._corrections:
            self._corrections[key] = self.memory.factor(plan, batch, hopeful=self.doubts > 0)
        return self._corrections[key]

    def _tokens_drafted(self, proposer: int, checker: int) -> list[float]:
        """Per length of a draft the tokens that it is expected to have."""
        found = self._drafted.get((proposer, checker))
        if found is None:
            found = self._drafted[proposer, checker] = list(accumulate(self._chances_to_last(proposer, checker)))
        return found

    def _tokens_kept(self, proposer: int, checker: int, factor: float = 1.0) -> list[float]:
        """Per length of a draft the tokens of it that are kept."""
        found = self._kept.get((proposer, checker, factor))
        if found is None:
            pair = self.memory.pair(self.levels, proposer, checker)
            found = list(accumulate(reach(pair.chances(self.doubts * pair.doubt), factor)))
            self._kept[proposer, checker, factor] = found
        return found

    def _chances_to_last(self, proposer: int, checker: int) -> list[float]:
        """Per position the chance that a draft gets there."""
        found = self._lasting.get((proposer, checker))
        if found is None:
            found = self._lasting[proposer, checker] = self.memory.pair(self.levels, proposer, checker).lengths()
        return found


def _slope(costs: PassCosts, few: float, many: float, slots: float) -> float:
    """Seconds of one token more, the mean between passes of few and of many."""
    return (costs.of(many, slots) - costs.of(few, slots)) / (many - few) if many > few else 0.0


def _alike(plan: Plan, batch: int) -> tuple:
    """Rounds that are corrected alike: of the same levels, and as many tokens and rows up to a factor of two."""
    return plan.active, plan.most.bit_length(), batch.bit_length()
