"""What do the measured cells say? Ratios of speeds, predictions, plans, and a verdict over all cells."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from eval.bench_auto.contenders import ALONE, AUTO, STOCK
from eval.records.markdown import fixed, geometric_mean, table

LONG_ANSWER = 64  # new tokens
LEAST_LONG, LEAST_SHORT = 0.97, 0.95  # of auto over the target alone, for such answers and for shorter ones
_WORST, _FREQUENT = 5, 3
Row = dict[str, Any]


def ratios(found: Row) -> Row:
    """What the takes of a cell say; a ratio is the median of those within a repeat, above 1 auto is faster.

    best: the fixed plan with the best median over the target alone, or the target alone where none is faster.
    """
    takes = found["takes"]
    over_alone = {name: _over(takes, name, ALONE) for name in takes[0]}
    plans = {name: ratio for name, ratio in over_alone.items() if name not in (AUTO, STOCK)}
    best = max(plans, key=plans.get)
    predicted, measured = (_pooled(found["plans"], f"{kind}tokens", f"{kind}seconds") for kind in ("expected_", ""))
    return {"tokens_per_second": {name: statistics.median(map(_rate, (one[name] for one in takes)))
                                  for name in takes[0]},
            "over_alone": over_alone, "best_fixed": best, "auto_over_alone": over_alone[AUTO],
            "auto_over_best": _over(takes, AUTO, best),
            "auto_over_stock": _over(takes, AUTO, STOCK) if STOCK in takes[0] else None,
            "predicted": predicted, "measured": measured,
            "predicted_over_measured": predicted / measured if predicted and measured else None}


def _rate(take: Row) -> float:
    return take["tokens"] / take["seconds"]


def _over(takes: list[Row], one: str, other: str) -> float:
    return statistics.median(_rate(take[one]) / _rate(take[other]) for take in takes)


def _pooled(plans: Row, tokens: str, seconds: str) -> float | None:
    amounts, times = (sum(plan[name] for plan in plans.values()) for name in (tokens, seconds))
    return amounts / times if times else None


def frequent(plans: Row) -> str:
    """The plans with most rounds, and their shares."""
    rounds = sum(plan["rounds"] for plan in plans.values())
    most = sorted(plans.items(), key=lambda item: -item[1]["rounds"])[:_FREQUENT]
    return ", ".join(f"{name} ({plan['rounds'] / rounds:.0%})" for name, plan in most) if rounds else "no round"


def is_slow(row: Row) -> bool:
    """Whether auto is too slow beside the target alone."""
    return row["auto_over_alone"] < (LEAST_LONG if row["new_tokens"] >= LONG_ANSWER else LEAST_SHORT)


def differing(rows: list[Row]) -> int:
    """Rows whose ids differ between auto and the target alone, of greedy cells."""
    return sum(row["rows_differing"] or 0 for row in rows)


def report(rows: list[Row], cells: int) -> Iterator[str]:
    """The Markdown: a row a cell, then what all of them say. cells: of the whole plan."""
    head = ["cell", "auto / alone", "auto / best fixed", "best fixed", "auto / stock", "tokens/s",
            "predicted / measured", "probe s", "rows that differ", "most frequent plans"]
    yield table(head, [[row["cell"], fixed(row["auto_over_alone"], 3), fixed(row["auto_over_best"], 3),
                        row["best_fixed"], fixed(row["auto_over_stock"]), fixed(row["tokens_per_second"][AUTO], 1),
                        fixed(row["predicted_over_measured"]), fixed(row["probe_seconds"]),
                        "-" if row["rows_differing"] is None else f"{row['rows_differing']} of {row['rows']}",
                        frequent(row["plans"])] for row in rows])
    yield from verdict(rows, cells)


def verdict(rows: list[Row], cells: int) -> Iterator[str]:
    """Sentences over all cells."""
    yield f"{len(rows)} of {cells} cells are measured."
    if not rows:
        return
    for name, title in (("auto_over_alone", "auto / alone"), ("auto_over_best", "auto / best fixed"),
                        ("auto_over_stock", "auto / stock"), ("predicted_over_measured", "predicted / measured")):
        known = [row[name] for row in rows if row[name]]
        if known:
            yield (f"- {title}: geometric mean {geometric_mean(known):.3f}, least {min(known):.3f}, most "
                   f"{max(known):.3f} ({len(known)} cells)")
    for told, least, those in ((f"{LONG_ANSWER} new tokens or more", LEAST_LONG,
                                [row for row in rows if row["new_tokens"] >= LONG_ANSWER]),
                               ("fewer", LEAST_SHORT, [row for row in rows if row["new_tokens"] < LONG_ANSWER])):
        yield f"- auto / alone below {least:.2f}, {told}: {sum(map(is_slow, those))} of {len(those)} cells"
    for name, title in (("auto_over_alone", "auto / alone"), ("auto_over_best", "auto / best fixed")):
        worst = sorted(rows, key=lambda row: row[name])[:_WORST]
        yield f"- worst cells, {title}: " + ", ".join(f"{row['cell']} {row[name]:.3f}" for row in worst)
    greedy = sum(row["rows"] for row in rows if row["rows_differing"] is not None)
    yield f"- greedy rows whose ids differ between auto and the target alone: {differing(rows)} of {greedy}"
