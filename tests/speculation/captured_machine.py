"""How does a controller of captured rounds do, from call to call, where capturing takes a good part of a call?

    python tests/speculation/captured_machine.py            # auto / alone and auto / best fixed plan, in every cell

As `eval.bench_auto` measures a cell: calls one behind another in one process, of which the last three count, behind as
many and two of 8 tokens. Fixed plans are captured beforehand. Levels draft as often right as the cell says, and take
as long as was measured or longer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from statistics import geometric_mean, median
from unittest.mock import patch

from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.fixed_rounds import FixedExpectations
from hf_mlspec.speculation.fixed_shapes import FixedController
from hf_mlspec.speculation.memory import LevelCosts, Memory
from hf_mlspec.speculation.plans import Plan, Situation, off
from hf_mlspec.speculation.rounds.program import UNROLLED

SLOTS = 100.0
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def passes(*milliseconds: float) -> PassCosts:
    """Costs of a pass over each of `COUNTS`."""
    return PassCosts(COUNTS, tuple(one / 1e3 for one in milliseconds), (0.02,) * len(COUNTS))


# The shape of an 8-billion-weight Llama on a large GPU, and a model of 21 million: the target, levels, and seconds of
# capturing a round of each forward pass.
LARGE = passes(4.7, 4.75, 4.8, 4.9, 5.0, 5.2, 5.8, 7.5, 12.0)
SMALL = passes(0.15, 0.15, 0.15, 0.16, 0.17, 0.2, 0.25, 0.35, 0.6)
MACHINES = {"large": (LARGE, 0.011), "small": (SMALL, 0.0015)}
LEVELS = {
    ("large", "cast"): LevelCosts("cast", passes(1.9, 1.95, 2.0, 2.1, 2.2, 2.5, 3.2, 5.0, 9.0), 0.85, own_cache=False),
    ("large", "draft"): LevelCosts("draft", passes(*[0.25 + 0.002 * n for n in COUNTS]), 0.65),
    ("small", "cast"): LevelCosts("cast", passes(*[0.12 + 0.001 * n for n in COUNTS]), 0.85, own_cache=False),
    ("small", "draft"): LevelCosts("draft", passes(*[0.06 + 0.0005 * n for n in COUNTS]), 0.65),
    ("small", "lookup"): LevelCosts("lookup", None, 0.35, own_cache=False),
}
CHAINS = {
    "large": [(("cast",), (1.0,)), (("cast",), (0.8,)), (("draft",), (0.05,)), (("draft",), (0.85,)),
              (("cast", "draft"), (1.0, 0.85))],
    "small": [(("draft",), (0.3,)), (("draft",), (0.6,)), (("draft",), (0.85,)), (("lookup",), (0.7,)),
              (("cast", "lookup"), (0.9, 0.6)), (("cast", "draft"), (0.95, 0.8))],
}  # fmt: skip


@dataclass
class Machine:
    """Rounds that do the same work whatever is kept. captured: plans of which there is a graph."""

    target: PassCosts
    levels: Sequence[LevelCosts]
    chances: tuple[float, ...]
    capturing: float
    longer: float = 1.0
    noise: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self):
        self.true = FixedExpectations(self.target, self.levels, Memory(), corrected=False)
        self.captured = [off(len(self.levels))]

    def ready(self, rows: int) -> list[Plan]:
        """As `Captures`."""
        return self.captured

    def seconds(self, plan: Plan, rows: int) -> float:
        """As `Captures`."""
        return 0.0 if plan in self.captured else self.capturing * (1 + sum(plan.lengths))

    def decode(self, rows: int, tokens: int, memory: Memory | None = None, fixed: Plan | None = None,
               seed: int = 0) -> tuple[float, Memory | None]:
        """Seconds of a call, and what its controller learned."""
        dice, left, taken = random.Random(seed), [tokens - 1] * rows, 0.0
        made = None
        if fixed is None:
            made = FixedController(self.target, self.levels, memory=memory, captures=self)
            made.start(rows)
        while max(left) > 0:
            plan = fixed
            if made is not None:
                if not made.stay(rows):
                    missing = [[0] * rows] * len(self.levels)
                    made.choose(Situation([max(one - 1, 0) for one in left], SLOTS, missing))
                plan = made.plan
                taken += self.seconds(plan, rows)
                if plan not in self.captured:
                    self.captured.append(plan)
            took = self._round(plan, rows)
            taken += took
            kept = [self._kept(plan, max(one - 1, 0), dice) for one in left]
            if made is not None:
                if len(plan.active) > 1:
                    self._tell_inner(made, plan, dice)
                asked = [plan.most] * rows
                made.observe(asked, asked, kept, took, True, made.choice)
            left = [one - gained - 1 for one, gained in zip(left, kept, strict=True)]
        return taken, made and made.memory.kept()

    def _tell_inner(self, made: FixedController, plan: Plan, dice: random.Random) -> None:
        """Checks of the last level by the one above it."""
        above, below = plan.active[-2:]
        for _ in range(max(plan.lengths[above] // (plan.lengths[below] + 1), 1)):
            kept = 0
            while kept < plan.lengths[below] and dice.random() < self.chances[below]:
                kept += 1
            made.observe_inner(above, plan.lengths[below], plan.lengths[below], kept)

    def _round(self, plan: Plan, rows: int) -> float:
        seconds = self.true.of(plan, rows, rows, SLOTS).by_costs
        return seconds * (self.longer if plan.active else 1.0) * self.noise.lognormvariate(0.0, 0.03)

    def _kept(self, plan: Plan, most: int, dice: random.Random) -> int:
        if not plan.active:
            return min(UNROLLED - 1, most)
        kept = 0
        while kept < min(plan.most, most) and dice.random() < self.chances[plan.active[0]]:
            kept += 1
        return kept


def cells() -> Iterator[tuple]:
    """All of them."""
    for name, chains in CHAINS.items():
        for (kinds, chances), longer, (rows, tokens) in product(chains, (1.0, 1.25), ((1, 256), (8, 256), (32, 32))):
            yield name, kinds, chances, longer, rows, tokens


def ratios(cell: tuple, seeds: int = 2) -> tuple[float, float]:
    """Auto / alone and auto / best fixed plan."""
    name, kinds, chances, longer, rows, tokens = cell
    target, capturing = MACHINES[name]
    levels = [LEVELS[name, kind] for kind in kinds]
    subsets = [set(one) for size in range(1, len(kinds) + 1) for one in combinations(range(len(kinds)), size)]
    plans = [Plan(tuple(n * (i in one) for i in range(len(kinds)))) for n in (2, 4, 8) for one in subsets]
    over, best = [], []
    for seed in range(seeds):
        machine, memory = Machine(target, levels, chances, capturing, longer, random.Random(seed)), None
        for number in range(8):
            taken, memory = machine.decode(rows, tokens if number > 1 else 8, memory, seed=100 * seed + number)
            if number > 4:
                alone = machine.decode(rows, tokens, fixed=off(len(kinds)), seed=number)[0]
                fixed = [machine.decode(rows, tokens, fixed=plan, seed=100 * seed + number)[0] for plan in plans]
                over.append(alone / taken)
                best.append(min(alone, *fixed) / taken)
    return median(over), median(best)


def main() -> None:
    with patch("hf_mlspec.speculation.controller.perf_counter", lambda: 0.0):  # choosing takes no time
        found = {cell: ratios(cell) for cell in cells()}
    for which, goal in ((0, 0.97), (1, 0.85)):
        line = {cell: both[which] for cell, both in found.items()}
        print(f"auto / {('alone', 'best fixed')[which]}: geometric mean {geometric_mean(line.values()):.3f}, "
              f"least {min(line.values()):.3f}, below {goal}: {sum(one < goal for one in line.values())} of "
              f"{len(line)}")
        for cell in sorted(line, key=line.get)[:8]:
            print(f"  {line[cell]:.3f}", *cell)


if __name__ == "__main__":
    main()
