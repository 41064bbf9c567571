"""What is known of a chain: the costs of its levels, how often their drafts are kept, and how long rounds took?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from .costs import DISTURBED, PassCosts
from .estimates import Counted, PairEstimate
from .plans import LENGTHS, TARGET, Plan

_FACTOR_WEIGHT, _FACTOR_WINDOW = 6.0, 64.0
_GAIN_WEIGHT, _GAIN_WINDOW = 16.0, 512.0  # drafted tokens, by which what chances say of rounds is corrected
_MOST_GAIN = 2.0  # times what chances say; the least is its inverse
_OFF_WEIGHT = 1.0  # of what costs say of "off", in timed rounds: all other plans are compared with it
_PACE = 0.25  # of what is known of the machine's pace is told by the last round
# Beside a load calls take up to four times as long. What is beyond that is no pace: it belongs to the rounds, or else
# captures and trials, which are paid in seconds, would be bought for a clock that jumps.
_MOST_PACE = 4.0  # the least is its inverse
_TOLD = 4.0  # rounds that say that costs do not hold
_MOST_BITS = 20  # of a number of rows: a file may say anything
_MOST_RATIO = 1e3  # measured over predicted seconds, or the inverse, that a file may tell of; more is no measurement
_LIKE_ITS_TWIN = 12.0  # observations of a level that what it does with another view of the cache is worth
_BITS = [length.bit_length() for length in LENGTHS]


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
    two; a ratio's `kept` is the sum of those observed. gains: by the same, drafted tokens that whole rounds brought
    over those that chances said: a text that gets easier as it goes on brings more than its mean. spare: seconds that
    may go to trials of other plans. credit: by active levels the seconds that were lost because no round of theirs was
    captured. capturing: seconds that may go to capturing rounds of trials. pace: how many times as long as usual
    rounds of all plans take at the moment, as other programs share the machine; ratios are without it, so that plans
    which ran at different times can be compared. costs: tells those by which ratios are from others; None: not known.
    calm: times as much is to be lost as at first until a plan is questioned, as it was, and was found best again.
    """

    pairs: dict[tuple[int, int], PairEstimate] = field(default_factory=dict)
    ratios: dict[tuple, Counted] = field(default_factory=dict)
    gains: dict[tuple, Counted] = field(default_factory=dict)
    spare: float = 0.0
    credit: dict[tuple[int, ...], float] = field(default_factory=dict)
    capturing: float = 0.0
    pace: float = 1.0
    costs: int | None = None
    calm: int = 1

    def kept(self) -> Memory:
        """As the start of another call."""
        pairs = list(self.pairs.items())  # another thread may have the memory
        remembered = {key: one.remembered() for key, one in pairs}
        ratios, gains = ({key: replace(one) for key, one in list(all_.items())} for all_ in (self.ratios, self.gains))
        return Memory(remembered, ratios, gains, self.spare, dict(self.credit), self.capturing, self.pace, self.costs,
                      self.calm)  # fmt: skip

    def rest_on(self, target: PassCosts, levels: Sequence[LevelCosts]) -> None:
        """From now on seconds are predicted by these costs: how far rounds were from others says nothing."""
        all_ = [target, *(level.costs for level in levels)]
        costs = hash(tuple((0.0,) if one is None else (*one.tokens, *one.seconds, one.attention) for one in all_))
        if self.costs not in (None, costs):
            self.ratios.clear()
            self.pace = 1.0
        self.costs = costs

    def corrects(self, costs: int | None) -> bool:
        """Whether ratios are from seconds that these costs predict; None: nobody knows which costs."""
        return costs in (None, self.costs)

    def disproves(self, target: PassCosts, round_seconds: float) -> bool:
        """Whether rounds of "off" take less than their pass alone is said to. Then something else ran when costs were
        measured, those of levels that nobody uses among them. round_seconds: of a round beside its passes."""
        for (active, _, bits), one in list(self.ratios.items()):
            if not active and 0 < bits <= _MOST_BITS and one.tried >= _TOLD:
                seconds = target.of(float(1 << bits - 1))  # of the fewest rows that count alike
                if self.pace * one.kept / one.tried * (seconds + round_seconds) < DISTURBED * seconds:
                    return True
        return False

    def to_dict(self) -> dict:
        """Chances and corrections in plain numbers, for JSON; what may be spent on trials is each process's own."""
        pairs, ratios = list(self.pairs.items()), []
        for (active, most, batch), one in list(self.ratios.items()):  # another thread may have the memory
            share = min(1.0, _FACTOR_WEIGHT / one.tried)  # the machine may have been busy
            ratios.append({"rounds": [list(active), most, batch], "counted": [one.tried * share, one.kept * share]})
        told = [{"levels": list(key), **one.to_dict()} for key, one in pairs]
        return {"pairs": told, "ratios": ratios, "costs": self.costs}

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
                ratio = Counted(_FACTOR_WINDOW)
                ratio.set(*map(float, one["counted"]), most=_MOST_RATIO)
                if ratio.kept < ratio.tried / _MOST_RATIO:
                    raise ValueError(f"{ratio.kept!r} of {ratio.tried!r} rounds")
                if ratio.tried:  # of no round nothing is known
                    memory.ratios[key] = ratio
            memory.costs = given.get("costs")
            if type(memory.costs) not in (int, type(None)):
                raise ValueError(f"costs {memory.costs!r}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"this is nothing that a controller learned: {error!r}") from error
        return memory

    def pair(self, levels: Sequence[LevelCosts], proposer: int, checker: int) -> PairEstimate:
        """The estimate of one level's drafts under another, or under the target. Of a pair never seen: what is known
        of it under a level in between, and of that under the checker; where those two differ, the draft is thought to
        be right half as often. Else the prior of the level's kind. A level with a draft window is thought to draft as
        it does without, until rounds have shown something else; of a level without one, what it does with it is the
        least."""
        return self.pairs.get((proposer, checker)) or _guess(*self._prior(levels, proposer, checker))

    def _prior(self, levels: Sequence[LevelCosts], proposer: int, checker: int) -> tuple[float, ...]:
        """Arguments of the estimate of a pair never seen."""
        twin, prior = levels[proposer].twin, levels[proposer].prior
        twins = self.pairs.get((twin, checker if checker == TARGET else levels[checker].twin))
        if twins is not None and (twin < proposer or twins.mean > prior):  # those with the window come last
            return twins.mean, _LIKE_ITS_TWIN
        for middle in range(checker + 1, proposer):
            parts = [self.pairs.get(key) for key in ((proposer, middle), (middle, checker))]
            if all(part is not None and part.known for part in parts):
                prior = parts[0].mean * 0.5 * (1.0 + parts[1].mean)
        return (prior,)

    def observed(self, levels: Sequence[LevelCosts], proposer: int, checker: int) -> PairEstimate:
        """The estimate of a pair of which something is about to be observed; from now on it is kept."""
        found = self.pairs.get((proposer, checker))
        if found is None:
            found = self.pairs[proposer, checker] = PairEstimate(*self._prior(levels, proposer, checker))
        return found

    def correct(self, plan: Plan, batch: int, ratio: float, rounds: int = 1) -> None:
        """So many rounds took `ratio` times what their costs say, without corrections."""
        key = _alike(plan.active, plan.most, batch)
        one = self.ratios.get(key) or Counted(_FACTOR_WINDOW)
        rounds = min(rounds, int(_FACTOR_WINDOW))
        if one.tried >= 1:
            now = ratio * one.tried / one.kept
            pace = self.pace * (now / self.pace) ** (1.0 - (1.0 - _PACE) ** rounds)
            self.pace = min(max(pace, 1.0 / _MOST_PACE), _MOST_PACE)
        one.add(rounds, rounds * ratio / self.pace)
        self.ratios[key] = one  # filled before another thread can see it

    def gained(self, plan: Plan, batch: int, tokens: float, by_chances: float) -> None:
        """Whole rounds of a plan brought so many drafted tokens, where chances said others."""
        key = _alike(plan.active, plan.most, batch)
        one = self.gains.get(key) or Counted(_GAIN_WINDOW)
        one.add(by_chances, tokens)
        self.gains[key] = one

    def gain(self, plan: Plan, batch: int) -> float:
        """Drafted tokens that a round of the plan brings, over those that chances say. Plans are compared without it:
        it tells how much a text differs from its mean, and one that no round was of would seem to lose."""
        one = self.gains.get(_alike(plan.active, plan.most, batch))
        return 1.0 if one is None else min(max(one.mean(1.0, _GAIN_WEIGHT), 1.0 / _MOST_GAIN), _MOST_GAIN)

    def factors(self, choices: Sequence[tuple[int, ...]], batch: int) -> tuple[list[list[float]], list[list[float]]]:
        """Measured over predicted seconds, per choice of levels and length of the target's draft: of rounds alike, and
        before there are many, of rounds of other plans. The second time hopefully: these may have been slow for a
        reason that rounds alike do not share."""
        rows, (everywhere, by_levels), pace = batch.bit_length(), self._sums(batch), self.pace
        found: tuple[list[list[float]], list[list[float]]] = [], []
        for active in choices:
            if (own := by_levels.get(active)) is None:
                for line, general in zip(found, (everywhere, min(everywhere, 1.0)), strict=True):
                    line.append([pace * general] * len(LENGTHS))
                continue
            alike = [self.ratios.get((active, bits, rows)) for bits in range(_BITS[-1] + 1)]
            for line, general in zip(found, (own, min(own, 1.0)), strict=True):
                each = [general if one is None else one.mean(general, _FACTOR_WEIGHT) for one in alike]
                line.append([pace * each[bits] for bits in _BITS])
        return found

    def factor_of_off(self, batch: int) -> float:
        """As `factors`, of the target alone. Slow rounds of other plans say nothing of it: what is promised is to be
        no slower than it."""
        if not self.ratios:
            return 1.0
        everywhere, by_levels = self._sums(batch)
        general, own = min(by_levels.get((), everywhere), 1.0), self.ratios.get(_alike((), 0, batch))
        return self.pace * (general if own is None else own.mean(general, _OFF_WEIGHT))

    def has_timed(self, active: tuple[int, ...], batch: int) -> bool:
        """Whether rounds of these levels have been timed, of as many rows up to a factor of two."""
        rows = batch.bit_length()
        return any(levels == active and bits == rows for levels, _, bits in list(self.ratios))

    @property
    def knows_off(self) -> bool:
        """Whether rounds of the target alone have been timed, of however many rows."""
        return any(not active for active, _, _ in list(self.ratios))

    def _sums(self, batch: int) -> tuple[float, dict[tuple[int, ...], float]]:
        """The mean ratio of all rounds of as many rows, or if there are none of all rounds, and that by levels."""
        rows, sums, all_kept, all_tried = batch.bit_length(), {}, 0.0, 0.0
        same_rows = [(key, one) for key, one in self.ratios.items() if key[2] == rows] or self.ratios.items()
        for (active, _, _), one in same_rows:
            kept, tried = sums.get(active, (0.0, 0.0))
            sums[active] = kept + one.kept, tried + one.tried
            all_kept, all_tried = all_kept + one.kept, all_tried + one.tried
        return all_kept / all_tried, {active: kept / tried for active, (kept, tried) in sums.items()}


@lru_cache(maxsize=256)
def _guess(prior: float, *weight: float) -> PairEstimate:
    """The estimate of a pair of which nothing was observed, and nothing will be."""
    return PairEstimate(prior, *weight)


def _alike(active: tuple[int, ...], most: int, batch: int) -> tuple:
    """Rounds that are corrected alike: of the same levels, and as many tokens and rows up to a factor of two."""
    return active, most.bit_length(), batch.bit_length()


def _index(at: int, levels: int) -> int:
    if type(at) is not int or not TARGET <= at < levels:
        raise ValueError(f"level {at!r} of {levels}")
    return at
