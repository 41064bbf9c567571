"""Does a choice find the plan that the equations, written out plan by plan, say is best?"""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest
from simulated import COUNTS, costs

from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.estimates import PairEstimate, reach
from hf_mlspec.speculation.fixed_shapes import Captured, FixedController
from hf_mlspec.speculation.memory import LevelCosts, Memory
from hf_mlspec.speculation.plans import LENGTHS, TARGET, Cells, Choices, Plan, Situation, cells_of
from hf_mlspec.speculation.rounds.chain import bucket_of
from hf_mlspec.speculation.rounds.program import MOST_PASSES, UNROLLED

LAUNCH, LOOKUP = {True: 6e-5, False: 1.5e-4}, {True: 1e-5, False: 3e-5}  # seconds of a round, by whether it is fixed
LARGEST = {1: 0.0, 2: 0.56, 4: 1.03, 8: 1.42}


def kept(pair: PairEstimate, length: float, doubts: float = 0.0, squares: bool = False) -> float:
    """Tokens that are kept of a draft, or what they add to the mean square of 1 + that."""
    found, whole = 0.0, math.floor(length)
    for i, chance in enumerate(reach(pair.chances(doubts * pair.doubt))):
        share = 1.0 if i < whole else length - whole if i == whole else 0.0
        found += share * chance * (2 * i + 3 if squares else 1)
    return found


class Plain:
    """A chain's expectations, reckoned one plan at a time."""

    def __init__(self, target: PassCosts, levels: list[LevelCosts], memory: Memory, rows: int, slots: float):
        self.target, self.levels, self.memory, self.rows, self.slots = target, levels, memory, rows, slots

    def pair(self, proposer: int, checker: int) -> PairEstimate:
        return self.memory.pair(self.levels, proposer, checker)

    def drafted(self, proposer: int, checker: int, length: int) -> float:
        return sum(self.pair(proposer, checker).lengths()[:length])

    def draft(self, active: tuple[int, ...], lengths: list[int], checker: int, doubts: float) -> float:
        """Seconds of a draft on the host."""
        costs, proposer = self.levels[active[0]].costs, active[0]
        if costs is None:
            return self.rows * LOOKUP[False]
        if len(active) == 1:
            alive = [self.rows * u for u in self.pair(proposer, checker).lengths()[: lengths[0] - 1]]
            steps = [costs.of(max(one, 1.0), self.slots) * min(one, 1.0) for one in alive]
            return costs.of(1.5 * self.rows, self.slots) + sum(steps)
        each = 1 + kept(self.pair(active[1], proposer), lengths[1], doubts)
        check = costs.of(self.rows * (1 + self.drafted(active[1], proposer, lengths[1])), self.slots)
        inner = self.draft(active[1:], lengths[1:], proposer, doubts)
        return max(self.drafted(proposer, checker, lengths[0]) / each, 1.0) * (inner + check)

    def on_host(self, active: tuple[int, ...], lengths: list[int], left: float, doubts: float) -> float:
        """Seconds until all rows have gained `left` tokens."""
        draft = self.draft(active, lengths, TARGET, doubts)
        seen = self.rows * (1 + self.drafted(active[0], TARGET, lengths[0]))
        alone = self.target.of(float(self.rows), self.slots) + LAUNCH[False]
        seconds = max(draft + self.target.of(seen, self.slots) + LAUNCH[False], alone + draft)
        return left * seconds / (1 + kept(self.pair(active[0], TARGET), lengths[0], doubts))

    def fixed_draft(self, active, lengths, depth: int, doubts: float) -> tuple[float, float, float, float]:
        """Most and expected tokens, seconds and passes of a draft of fixed shape."""
        level, length, rows = self.levels[active[0]], lengths[0], bucket_of(self.rows)
        if level.costs is None:
            return length, length, LOOKUP[True], 0
        lead = depth + 1.0 if level.own_cache else 1.0
        if len(active) == 1:
            seconds = level.costs.of(rows * lead, self.slots) + (length - 1) * level.costs.of(float(rows), self.slots)
            return length, length, seconds, length
        most, expected, seconds, passes = self.fixed_draft(active[1:], lengths[1:], depth + 1, doubts)
        rounds = math.ceil(length / (most + 1))
        seconds = rounds * (seconds + level.costs.of(rows * (most + lead), self.slots))
        each = 1 + kept(self.pair(active[1], active[0]), min(expected, 16), doubts)
        return rounds * (most + 1), rounds * each, seconds, rounds * (passes + 1)

    def fixed(self, active: tuple[int, ...], lengths: list[int], left: float, doubts: float) -> float:
        """Seconds until the slowest row has gained `left` tokens, in rounds of fixed shapes."""
        most, length, draft, passes = self.fixed_draft(active, lengths, 1, doubts)
        if passes + 1 > MOST_PASSES:
            return math.inf
        bucket, pair = bucket_of(self.rows), self.pair(active[0], TARGET)
        off = self.target.of(float(bucket), self.slots) + LAUNCH[True] / UNROLLED
        seconds = max(draft + self.target.of(bucket * (most + 1.0), self.slots) + LAUNCH[True], off + draft)
        mean = 1 + kept(pair, min(length, 16), doubts)
        variance = max(1 + kept(pair, min(length, 16), doubts, squares=True) - mean**2, 1e-6)
        many = left / mean * (1 + LARGEST[self.rows] * math.sqrt(variance / (mean * left)))
        if many > 6:
            return many * seconds
        rounds, wanted = 1.0, math.ceil(left) - 1
        for number in range(1, 13):
            value = (number * mean - left + 0.5) / math.sqrt(number * variance)
            exponent = min(max(-value * (1.5976 + 0.070565992 * value**2), -80.0), 80.0)
            done = 1 / (1 + math.exp(exponent))
            if number == 1:
                chances = [1.0, *reach(pair.chances(doubts * pair.doubt))]
                done = chances[wanted] if wanted <= 16 and length >= wanted else 0.0
            rounds += 1 - done**self.rows
        return rounds * seconds


def random_costs(dice: random.Random) -> PassCosts:
    one = 10 ** dice.uniform(-4, -2)
    made = costs(one, one * 10 ** dice.uniform(-3, -0.5))
    return PassCosts(made.tokens, made.seconds, made.spread, one * dice.choice([0.0, 1e-5, 1e-4]),
                     dice.choice([None, None, 128]))  # fmt: skip


def random_chain(dice: random.Random, count: int) -> tuple[PassCosts, list[LevelCosts], Memory]:
    levels = [LevelCosts(f"level {i}", random_costs(dice), dice.uniform(0.2, 0.95), dice.random() < 0.6,
                         dice.random() < 0.8) for i in range(count)]  # fmt: skip
    if dice.random() < 0.3:
        levels[-1] = LevelCosts("lookup", None, 0.4, own_cache=False)
    memory = Memory()
    for proposer, checker in [(i, j) for i in range(count) for j in (TARGET, *range(i)) if dice.random() < 0.8]:
        chance = dice.random()
        for _ in range(dice.choice([1, 10, 60])):
            limit = dice.choice(LENGTHS)
            drafted = dice.choice([limit, limit, dice.randint(0, limit)])
            accepted = next((n for n in range(drafted) if dice.random() > chance), drafted)
            memory.observed(levels, proposer, checker).observe(limit, drafted, accepted)
    return random_costs(dice), levels, memory


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "host"])
@pytest.mark.parametrize("seed", range(12))
def test_every_plan_takes_what_the_equations_say(seed, fixed):
    dice = random.Random(seed)
    count, rows, room, slots = dice.choice([1, 2, 2, 3]), dice.choice([1, 2, 8]), dice.choice([5, 20, 250]), 90.0
    slots *= dice.choice([1, 10])
    target, levels, memory = random_chain(dice, count)
    made = (FixedController(target, levels, memory=memory, captures=Captured()) if fixed
            else Controller(target, levels, memory=memory))  # fmt: skip
    made.start(rows)
    made.rows.gained = [1000] * rows
    situation = Situation([room] * rows, slots, [[0] * rows for _ in levels])
    plain, choices = Plain(target, levels, memory, rows, slots), Choices(levels).at(slots)
    for doubts in (0.0, 1.0):
        usual = made._search(situation)
        search = usual.hoped() if doubts else usual
        reckon = plain.fixed if fixed else plain.on_host
        times = {(active, lengths): reckon(active, list(lengths), room + 1.0, doubts)
                 for active in choices for lengths in product(LENGTHS, repeat=len(active))}  # fmt: skip
        found = {key: search.time(plan_of(*key, count)) for key in times}
        assert found == pytest.approx(times, rel=1e-9)
        least = min(times, key=times.get)
        if not doubts:
            plan, chosen = made.best_of(situation).plan, plan_of(*least, count)
            off = search.time(search.off) * (1.0 - made._margin)
            expected = times[least] if times[least] < off else off
            assert search.time(plan) == pytest.approx(expected if plan.active else search.time(search.off), rel=1e-9)
            assert bool(plan.active) == (times[least] < off)
            assert plan == chosen or not plan.active or times[least] == pytest.approx(search.time(plan), rel=1e-9)


def plan_of(active: tuple[int, ...], lengths: tuple[int, ...], count: int) -> Plan:
    own = dict(zip(active, lengths, strict=True))
    return Plan(tuple(own.get(index, 0) for index in range(count)))


def test_a_pass_of_one_number_takes_what_one_of_many_takes():
    made = PassCosts(COUNTS, tuple(1e-3 + 1e-5 * n**0.7 for n in COUNTS), (0.0,) * len(COUNTS), 1e-8)
    numbers = [0.5, 1.0, 1.5, 3.0, 511.0, 512.0, 700.0, 1e7]
    assert [made.of(n, 300.0) for n in numbers] == pytest.approx(made.of(np.array(numbers), 300.0).tolist(), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_plan_stands_somewhere(count):
    cells: Cells = cells_of(Choices([LevelCosts(str(i), costs(1, 1), 0.5) for i in range(count)]).whole, count)
    places = range(0, len(cells.choice), max(len(cells.choice) // 997, 1))
    assert [cells.place_of(cells.plan_at(place)) for place in places] == list(places)
