"""What did a captured round do, check by check? The numbers that it reported, row by row."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..checker import Checker
from ..draft import Rows
from ..stats import SpeculationStats
from .program import CHECK_FIELDS, NOT_CHECKED, Check, LookupLevel, RoundProgram


@dataclass
class Told:
    """One check. drafter, checker: indices of levels in their chain, -1 for the target. asked: tokens that every row
    could have been drafted; drafted, accepted: those that were; alive: whether the row took part."""

    checker: int
    drafter: int
    asked: list[int]
    drafted: list[int]
    accepted: list[int]
    alive: list[bool]


@dataclass
class Report:
    """A round. tokens: those that the target accepted of every row. checks: of the rounds with levels, in order."""

    tokens: Rows
    checks: list[Told] = field(default_factory=list)


def told(program: RoundProgram, lines: list[list[int]], rooms: list[int]) -> Report:
    """lines: what the rows reported. rooms: tokens that each may gain, but the one that every round adds."""
    report = Report([[] for _ in lines])
    # In the draft of the level below the target
    left = [min(program.handed_up(1), room) for room in rooms] if program.active else rooms
    for check in program.checks:
        column = check.column
        pairs = [line[column : column + CHECK_FIELDS] for line in lines]
        alive = [drafted != NOT_CHECKED for drafted, _ in pairs]
        drafted, accepted = ([max(pair[i], 0) for pair in pairs] for i in range(CHECK_FIELDS))
        if check.level == 0:
            for tokens, line, on, count in zip(report.tokens, lines, alive, accepted, strict=True):
                tokens += line[column + CHECK_FIELDS : column + CHECK_FIELDS + count + 1] if on else []
        if not program.active:
            continue
        asked = drafted
        if isinstance(program.levels[check.level + 1], LookupLevel):
            asked = _asked(check, rooms if check.level == 0 else [n - 1 for n in left], drafted, alive)
        checker = program.active[check.level - 1] if check.level else -1
        report.checks.append(Told(checker, program.active[check.level], asked, drafted, accepted, alive))
        if check.level == 1:
            left = [n - (a + 1) * on for n, a, on in zip(left, accepted, alive, strict=True)]
    return report


def _asked(check: Check, rooms: list[int], drafted: list[int], alive: list[bool]) -> list[int]:
    """Of a lookup, which may find fewer tokens than there is room for; of levels further down only what they found."""
    if check.level > 1:
        return drafted
    return [max(min(check.judged - 1, room), 0) if on else 0 for room, on in zip(rooms, alive, strict=True)]


def tell_steps(target: Checker, gained: list[int], stats: SpeculationStats) -> None:
    """Without levels each token took a pass; what ran behind the end of a row is no one's."""
    for step in range(max(gained, default=0)):
        alive = [count > step for count in gained]
        stats.count_pass(sum(alive))
        tell(target, [0] * len(gained), [0] * len(gained), alive)


def tell(checker: Checker, drafted: list[int], accepted: list[int], alive: list[bool]) -> None:
    """Tell who listens to the checks of a level of one of them."""
    if checker.on_check is not None:
        checker.on_check(drafted, accepted, alive)
