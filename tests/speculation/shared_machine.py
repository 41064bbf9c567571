"""How does a controller do on a machine that other programs share, with levels that take longer than was measured?

    python tests/speculation/shared_machine.py WRONG TOKENS ROWS ...        # auto / alone, auto / best fixed plan

Six calls one behind another, as a process makes them: two of 8 tokens, then four of TOKENS that count. Every call and
every round is slower by chance, and WRONG (0: not at all) says how much slower than they are passes seemed when costs
were measured; what the controller sees of that, and no more, is noise: ratios are of the seconds
that the passes would take on an idle machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from statistics import geometric_mean, median
from unittest.mock import patch

from simulated import Simulated, costs

from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.memory import LevelCosts
from hf_mlspec.speculation.plans import Plan, off

TARGETS = {"memory": costs(5e-3, 2e-5), "arithmetic": PassCosts((1, 2, 4, 8, 16, 64), tuple(
    x * 1e-3 for x in (6.5, 7.9, 9.3, 15.1, 24.3, 100.0)), (0.02,) * 6)}  # fmt: skip
# prior, cost of a pass over that of the target, whether it has a cache of its own
LEVELS = {"cast": (0.85, 0.45, False), "draft": (0.65, 0.06, True), "lookup": (0.35, None, False)}
CHAINS = {
    ("cast",): ((0.5,), (0.7,), (0.8,), (0.95,)),
    ("draft",): ((0.02,), (0.3,), (0.5,), (0.65,), (0.8,)),
    ("lookup",): ((0.05,), (0.3,), (0.6,)),
    ("cast", "draft"): ((0.8, 0.3), (0.8, 0.5), (0.95, 0.7)),
}  # and chances that the target keeps a token
LONGER = (1.0, 1.8)  # times as long as measured a level takes
Cell = tuple[str, tuple[str, ...], tuple[float, ...], float, int]


class Shared(Simulated):
    """A machine whose calls are slower by up to .7, and its rounds by an eighth, one in 25 by 1.5; `idle`: seconds
    without that."""

    idle = 0.0

    def decode(self, controller: Controller | None, rows: int, tokens: int, fixed: Plan | None = None) -> float:
        self.noise, self.idle = random.Random(7 * self.seed + 1), 0.0
        self.call = self.noise.choice((1.0, 1.0, 1.3, 1.7))
        super().decode(controller, rows, tokens, fixed)
        return self.idle

    def _round(self, *given: object) -> tuple[list[int], list[int]]:
        usual = self.call * self.noise.lognormvariate(0.0, 0.12)
        self.busy = 2.5 * usual if self.noise.random() < 0.04 else usual
        return super()._round(*given)

    def _spend(self, seconds: float) -> None:
        self.idle += seconds
        super()._spend(seconds)


def cells(rows: list[int]) -> Iterator[Cell]:
    """All of them: target, levels, chances, how much longer levels take, rows."""
    for target, (kinds, all_), longer, count in product(TARGETS, CHAINS.items(), LONGER, rows):
        if kinds != ("lookup",) or longer == 1.0:
            yield from ((target, kinds, chances, longer, count) for chances in all_)


def ratios(cell: Cell, tokens: int, wrong: float = 0.0, seeds: int = 2) -> tuple[list[float], float]:
    """Auto / alone of every call that counts, and what the best fixed plan reaches. wrong: see `beside_a_load`."""
    name, kinds, chances, longer, rows = cell
    target, count = TARGETS[name], len(kinds)
    told, true = ([_level(kind, target, times) for kind in kinds] for times in (1.0, longer))

    def chance(row: int, checker: int, proposer: int, so_far: int) -> float:
        return chances[proposer] if checker < 0 else min(chances[proposer] / chances[checker], 1.0)

    subsets = [set(one) for size in range(1, count + 1) for one in combinations(range(count), size)]
    fixed = {Plan(tuple(n * (i in one) for i in range(count))): [] for n in (2, 4, 8) for one in subsets}
    found = []
    for seed in range(seeds):
        memory, dice = None, random.Random(f"{seed} {cell}")
        measured = beside_a_load(target, wrong, dice)
        believed = [replace(one, costs=one.costs and beside_a_load(one.costs, wrong, dice)) for one in told]
        for number in range(6):
            machine, new = Shared(target, true, chance, seed=100 * seed + number + 1), tokens if number > 1 else 8
            controller = Controller(measured, believed, memory=memory)
            auto, memory = machine.decode(controller, rows, new), controller.memory.kept()
            if number > 1:
                alone = machine.decode(None, rows, new, off(count))
                found.append(alone / auto)
                for plan, line in fixed.items():
                    line.append(alone / machine.decode(None, rows, new, plan))
    return found, max(1.0, *map(median, fixed.values()))


def beside_a_load(costs: PassCosts, wrong: float, dice: random.Random) -> PassCosts:
    """Costs as they are measured while something else runs: every pass seems slower by chance, half of them not,
    the others by a factor of up to about `wrong` and 1, and more tokens never cost less."""
    if not wrong:
        return costs
    seconds = [one * (1.0 + wrong * dice.choice((0.0, 0.0, 0.5, 1.0)) * dice.lognormvariate(0.0, 0.2))
               for one in costs.seconds]  # fmt: skip
    for at in range(len(seconds) - 2, -1, -1):
        seconds[at] = min(seconds[at], seconds[at + 1])
    return replace(costs, seconds=tuple(seconds), spread=(0.02,) * len(seconds))


def _level(kind: str, target: PassCosts, times: float) -> LevelCosts:
    prior, share, own_cache = LEVELS[kind]
    taken = share and PassCosts(target.tokens, tuple(times * share * s for s in target.seconds), target.spread)
    return LevelCosts(kind, taken, prior, own_cache=own_cache)


def main(wrong: float, tokens: int, *rows: int) -> None:
    with patch("hf_mlspec.speculation.controller.perf_counter", lambda: 0.0):  # choosing takes no time
        found = {cell: ratios(cell, tokens, wrong) for cell in cells(list(rows))}
    auto = {cell: median(calls) for cell, (calls, _) in found.items()}
    over = {cell: auto[cell] / best for cell, (_, best) in found.items()}
    goal = 0.97 if tokens >= 64 else 0.95
    calls = [one for line, _ in found.values() for one in line]
    print(f"{len(found)} cells of {tokens} tokens")
    for what, line, least in (("alone", auto, goal), ("best fixed", over, 0.85)):
        values = line.values()
        print(f"auto / {what}: geometric mean {geometric_mean(values):.3f}, least {min(values):.3f}, "
              f"below {least}: {sum(one < least for one in values)}")
    print(f"single calls: least {min(calls):.2f}, below {goal}: {sum(one < goal for one in calls) / len(calls):.1%}")
    for cell in sorted(auto, key=auto.get)[:8]:
        print(f"{auto[cell]:.3f}", *cell)


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
