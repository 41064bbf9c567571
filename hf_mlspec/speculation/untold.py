"""What have rounds done that nothing was learned from yet? It takes less of many at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .estimates import RowEstimates
from .memory import LevelCosts, Memory
from .plans import TARGET
from .search import Choice

_MOST = 64  # rounds times rows that wait: more than what is remembered of a row would be learned at once

TRIAL_SHARE = 0.01  # of all seconds may go to finding out whether another plan is better

Round = tuple[list[int], list[int], list[int], float, bool]


class Untold:
    """Rounds of one choice, in their order, and checks inside of them.

    Each round: row by row what was asked for, drafted and accepted; the seconds that count for it; whether they were
    measured, of a whole round of the plan. Each check: the levels of its round, the one that checks, and for one row
    what was asked for, drafted and accepted.
    """

    def __init__(self) -> None:
        self.choice: Choice | None = None
        self.rounds: list[Round] = []
        self.inner: list[tuple[tuple[int, ...], int, int, int, int]] = []

    @property
    def is_full(self) -> bool:
        """Whether it is time to learn of them."""
        return len(self.rounds) * len(self.rounds[-1][0]) >= _MOST

    def tell(self, memory: Memory, levels: Sequence[LevelCosts], rows: RowEstimates) -> float:
        """Let memory and rows know of all of it; -> the seconds that rounds took."""
        (rounds, self.rounds), (inner, self.inner) = (self.rounds, []), (self.inner, [])
        committed = [len(accepted) + sum(accepted) for _, _, accepted, _, _ in rounds]
        for pair in memory.pairs.values():
            pair.idle += sum(committed)
        last = committed[-1] if committed else 0
        for (proposer, checker), checks in _by_pair(inner).items():
            memory.observed(levels, proposer, checker).observe_all(checks, last)
        if not rounds:
            return 0.0
        plan, by_rows = self.choice.plan, _by_rows(rounds)
        rows.gain([len(rounds) - 1 + sum(checks[2] * times for checks, times in row.items()) for row in by_rows])
        if plan.active:
            pair = memory.observed(levels, plan.active[0], TARGET)
            for row, counted in zip(rows.rows, by_rows, strict=True):
                checks = [(*check, times) for check, times in counted.items() if check[0]]
                if checks:
                    row.add(*pair.observe_all(checks, last))
        timed = [seconds for *_, seconds, usual in rounds if usual]
        if timed:
            if memory.corrects(self.choice.costs):  # costs may have been measured anew since it was made
                ratio = sum(timed) / len(timed) / self.choice.forecast.by_costs
                memory.correct(plan, len(self.choice.limits), ratio, len(timed))
            if self.choice.by_chances:
                brought = sum(max(kept, 0) for _, _, accepted, _, usual in rounds if usual for kept in accepted)
                memory.gained(plan, len(self.choice.limits), brought, len(timed) * self.choice.by_chances)
        return sum(seconds for *_, seconds, _ in rounds)


class Learner:
    """What learns of rounds when it is asked what it knows: memory, and rows."""

    def __init__(self, memory: Memory, levels: Sequence[LevelCosts]):
        self.levels = list(levels)
        self._memory, self._rows, self._untold = memory, RowEstimates(), Untold()

    @property
    def memory(self) -> Memory:
        """What was learned, of all rounds so far."""
        self.settle()
        return self._memory

    @property
    def rows(self) -> RowEstimates:
        """What is known of each row, of all rounds so far."""
        self.settle()
        return self._rows

    def settle(self) -> None:
        """Learn of rounds that wait until that is asked for."""
        if self._untold.rounds or self._untold.inner:
            seconds = self._untold.tell(self._memory, self.levels, self._rows)
            self._memory.spare += TRIAL_SHARE * seconds


def _by_pair(inner: list[tuple]) -> dict[tuple[int, int], list[tuple[int, int, int, int]]]:
    """Checks by who drafted and who checked, and how often each came."""
    found: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for (active, checker, limit, drafted, accepted), times in Counter(inner).items():
        below = next((index for index in active if index > checker), None)
        if below is not None and limit > 0:
            found.setdefault((below, checker), []).append((limit, drafted, accepted, times))
    return found


def _by_rows(rounds: list[Round]) -> list[Counter]:
    """Per row the checks by the target, and how often each came."""
    if len(rounds[0][0]) == 1:
        return [Counter([(limits[0], drafted[0], accepted[0]) for limits, drafted, accepted, *_ in rounds])]
    each = [list(zip(limits, drafted, accepted, strict=True)) for limits, drafted, accepted, *_ in rounds]
    return [Counter(line) for line in zip(*each, strict=True)]
