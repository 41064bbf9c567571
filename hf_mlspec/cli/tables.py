"""How do the numbers of a decode look on a terminal, and how in a pipe?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ..integration.compare import Comparison, Difference
from ..speculation.stats import LevelStats, PlanStats, SpeculationStats

PLAN_COLUMNS = ("plan", "rounds", "expected tokens/s", "tokens/s", "gain over off")
MOST_PLANS = 5
_SLOWER = 1.03  # times the target's seconds: less is no news
_BUSY = 1.2  # programs that want to run, for each core
LEVEL_COLUMNS = ("level", "drafted", "tested", "accepted", "acceptance", "forwards", "ms/forward", "seconds")


def level_rows(levels: Iterable[LevelStats]) -> list[tuple[str, ...]]:
    """One row of LEVEL_COLUMNS per level; a folder goes by its last part."""
    return [(level.name.rpartition("/")[2], str(level.drafted), str(level.tested), str(level.accepted),
             f"{level.acceptance:.3f}", str(level.forwards), _milliseconds(level.seconds, level.forwards),
             f"{level.seconds:.2f}") for level in levels]


def _milliseconds(seconds: float, forwards: int) -> str:
    return f"{1000 * seconds / forwards:.2f}" if forwards else "-"


def where_time_went(stats: SpeculationStats) -> str:
    """The target's share of a call, and what was spent in no forward pass, in one line."""
    return (f"target: forwards {stats.target_passes}, ms/forward "
            f"{_milliseconds(stats.target_seconds, stats.target_passes)}, seconds {stats.target_seconds:.2f}; "
            f"outside forward passes: {stats.seconds_outside_forwards:.2f} s")


def show_plans(console: Console, stats: SpeculationStats) -> None:
    """What the controller chose, the most frequent first, and how fast it was; nothing where lengths were given."""
    if not stats.plans:
        return
    plans = sorted(stats.plans.items(), key=lambda item: -item[1].rounds)
    rows = [_plan_row(name, plan) for name, plan in plans[:MOST_PLANS]]
    if len(plans) > 1:
        total = PlanStats()
        for _, plan in plans:
            total.add(plan)
        rows.append(_plan_row(f"all {len(plans)} plans", total))
    show(console, "plans, chosen round by round", PLAN_COLUMNS, rows)


def _plan_row(name: str, plan: PlanStats) -> tuple[str, ...]:
    """"-" for the speeds of a plan whose rounds all did something else too, such as reading a prompt."""
    if not plan.seconds:
        return name, str(plan.rounds), "-", "-", "-"
    expected, measured = plan.expected_tokens / plan.expected_seconds, plan.tokens / plan.seconds
    return name, str(plan.rounds), f"{expected:.1f}", f"{measured:.1f}", f"{plan.off_seconds / plan.seconds:.2f} x"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A rich table: the first column left-aligned, the rest numbers."""
    drawn = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def show(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere one line per row: `name: column value, column value`, or `name: value`."""
    if console.is_terminal:
        console.print(table(title, columns, rows))
        return
    say(console, title)
    for name, *values in rows:
        named = [f"{column} {value}" for column, value in zip(columns[1:], values, strict=True)]
        say(console, f"  {name}: " + ", ".join(named if len(named) > 1 else values))


def say(console: Console, line: str) -> None:
    """One line as it is: no markup, no wrapping, no colours guessed."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_comparison(console: Console, comparison: Comparison, title: str) -> None:
    """Acceptance per level, then speeds, of a finished comparison."""
    stats = comparison.speculation
    show(console, title, LEVEL_COLUMNS, level_rows(stats.levels))
    show_plans(console, stats)
    ways = [("chain", [item.ids for item in comparison.items], comparison.chain_seconds),
            ("target alone", [item.reference_ids or [] for item in comparison.items], comparison.alone_seconds)]
    rows = [(name, str(tokens := sum(map(len, ids))), f"{seconds:.2f}", f"{tokens / seconds:.1f}")
            for name, ids, seconds in ways if seconds]
    show(console, "speed", ("", "tokens", "seconds", "tokens/s"), rows)
    say(console, where_time_went(stats))
    chain, alone = comparison.chain_seconds, comparison.alone_seconds
    faster = f"; the chain is {alone / chain:.2f} x as fast as the target alone" if chain and alone else ""
    say(console, f"tokens per target pass: {stats.tokens_per_target_pass:.2f}{faster}")
    if slower := why_slower(comparison):
        say(console, slower)


def why_slower(comparison: Comparison) -> str:
    """Why a chain took longer than the target alone, as far as that is known, and the remedy; "" where it did not."""
    chain, alone, stats = comparison.chain_seconds, comparison.alone_seconds, comparison.speculation
    if not alone or chain <= _SLOWER * alone:
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    rounds = sum(plan.rounds for plan in stats.plans.values())
    if load > _BUSY * cores:
        why = (f"the machine is busy (load {load:.1f} on {cores} cores), and passes then vary by more than levels "
               "gain; run it again when nothing else runs")
    elif not rounds:
        why = "draft lengths were given, so that no call may do without its levels; drop them, and each call chooses"
    elif stats.of_plan("off").rounds > rounds / 2:
        why = ('most rounds were "off": levels hardly pay here, and trying them takes time; longer answers and later '
               "calls know more, and mlspec tune shows which acceptance levels need")
    else:
        why = (f"its rounds were expected to write {stats.expected_tokens_per_second:.0f} tokens/s and wrote "
               f"{stats.tokens_per_second:.0f}; mlspec tune measures the costs of passes anew")
    return f"the chain took {chain / alone:.2f} x the time of the target alone: {why}"


def describe(prompt: int, difference: Difference) -> str:
    """One difference in one line."""
    expected, got = ("the end" if token is None else f"id {token}" for token in (difference.expected, difference.got))
    (first, _), (second, _) = difference.top2_float64
    return (f"prompt {prompt}, new token {difference.position}: target alone {expected}, chain {got}; "
            f"top-2 gap {difference.gap:.3g}, in float64 {difference.gap_float64:.3g} (ids {first} and {second})")
