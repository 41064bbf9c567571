"""A machine and a text that exist as numbers only: how would a controller do on them?"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.memory import LevelCosts
from hf_mlspec.speculation.plans import Plan, Situation

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def costs(one: float, token: float) -> PassCosts:
    """A pass takes `one` seconds and `token` more for every token behind the first."""
    return PassCosts(COUNTS, tuple(one + token * (n - 1) for n in COUNTS), (0.0,) * len(COUNTS))


@dataclass
class Simulated:
    """Rounds of a target over levels, decided by dice.

    chance(row, checker, proposer, tokens so far): that a drafted token is kept. busy: what every round takes longer.
    slots: that every token is behind.
    """

    target: PassCosts
    levels: list[LevelCosts]
    chance: Callable[[int, int, int, int], float]
    seed: int = 0
    busy: float = 1.0
    slots: float = 0.0
    seconds: float = 0.0
    plans: list[Plan] = field(default_factory=list)

    def decode(self, controller: Controller | None, rows: int, tokens: int, fixed: Plan | None = None) -> float:
        """Write `tokens` for each of so many rows; -> seconds."""
        self.dice, self.seconds, self.plans = random.Random(self.seed), 0.0, []
        written, read = [0] * rows, [[0] * len(self.levels) for _ in range(rows)]
        if controller is not None:
            controller.start(rows)
        going = list(range(rows))
        while going:
            rooms = [tokens - written[r] - 1 for r in going]
            missing = [[written[r] - read[r][i] if level.own_cache else 0 for r in going]
                       for i, level in enumerate(self.levels)]
            if controller is not None:
                stays = controller.stay(len(going))
                plan = controller.plan if stays else controller.choose(Situation(rooms, self.slots, missing))
                limits = [min(a, b) for a, b in zip(controller.limits, rooms, strict=True)]
            else:
                plan, limits = fixed, [min(fixed.most, room) for room in rooms]
            begin = self.seconds
            late = max((line[i] for line in missing for i, limit in enumerate(limits) if limit), default=0)
            drafted, accepted = self._round(controller, plan, limits, going, written, read)
            if controller is not None:
                controller.observe(limits, drafted, accepted, self.seconds - begin, late <= 4)
            self.plans.append(plan)
            for r, a in zip(going, accepted, strict=True):
                written[r] += a + 1
            keep = [i for i, r in enumerate(going) if written[r] < tokens]
            if len(keep) < len(going):
                going = [going[i] for i in keep]
                if controller is not None and going:
                    controller.select(keep)
        return self.seconds

    def _round(self, controller, plan, limits, going, written, read):
        drafted, accepted = [0] * len(going), [0] * len(going)
        if any(limits):
            for i, limit in enumerate(limits):
                if limit:
                    drafted[i] = limit
                    accepted[i] = self._kept(going[i], -1, plan.active[0], limit, written[going[i]])
            self._draft(controller, plan, list(plan.active), -1, limits, going, written)
            for index in plan.active:
                for i, limit in enumerate(limits):
                    if limit:
                        late = written[going[i]] - read[going[i]][index]
                        level = self.levels[index]
                        if late > 2 and level.own_cache and level.costs:
                            self._spend(level.costs.of(late, self.slots))
                        read[going[i]][index] = written[going[i]] + accepted[i]
        self._spend(self.target.of(len(going) + sum(drafted), self.slots))
        return drafted, accepted

    def _draft(self, controller, plan, active, checker, limits, going, written) -> None:
        index, *below = active
        level = self.levels[index]
        if level.costs is None:
            return
        if not below:
            for step in range(max(limits)):
                self._spend(level.costs.of(sum(limit > step for limit in limits), self.slots))
            return
        left = list(limits)
        while any(n > 0 for n in left):
            asked = [min(max(n - 1, 0), plan.lengths[below[0]]) for n in left]
            if any(asked):
                self._draft(controller, plan, below, index, asked, going, written)
            self._spend(level.costs.of(sum(asked) + sum(n > 0 for n in left), self.slots))
            for i, n in enumerate(left):
                if n > 0:
                    kept = self._kept(going[i], index, below[0], asked[i], written[going[i]])
                    if controller is not None:
                        controller.observe_inner(index, asked[i], asked[i], kept)
                    left[i] -= kept + 1

    def _kept(self, row: int, checker: int, proposer: int, limit: int, so_far: int) -> int:
        for n in range(limit):
            if self.dice.random() >= self.chance(row, checker, proposer, so_far + n):
                return n
        return limit

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds * self.busy
