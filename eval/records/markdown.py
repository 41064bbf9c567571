"""How do numbers become a Markdown table?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

Row = dict[str, Any]


def table(head: list[str], rows: Iterable[list[Any]], *, left: int = 1) -> str:
    """A table whose first `left` columns are aligned left, the others right; ends with an empty line."""
    lines = ["| " + " | ".join(map(cell, head)) + " |",
             "|" + "|".join(["---"] * left + ["--:"] * (len(head) - left)) + "|"]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    """Text that cannot end its cell or its line; nothing for None."""
    return "" if value is None else " ".join(str(value).replace("|", "\\|").split())


def fixed(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def megabytes(value: float | None) -> str | None:
    return None if value is None else f"{value / 1e6:,.1f}"


def percent(value: float | None, digits: int = 1) -> str | None:
    return None if value is None else f"{100 * value:.{digits}f} %"


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Of the ratios there are; None of nothing."""
    known = [ratio for ratio in ratios if ratio]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def distinct(rows: list[Row], name: str) -> list[Any]:
    """The values of a field, in the order they came."""
    return list(dict.fromkeys(row[name] for row in rows))


def groups(rows: list[Row], *names: str) -> Iterator[tuple[tuple, list[Row]]]:
    """The rows by the values of these fields, in the order they came."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from found.items()
