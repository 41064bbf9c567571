"""How are the fields of a line of results read, and named in tables?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def number(entry: Row, name: str, *, none: bool = False) -> float | None:
    """A finite number of a line; with `none`, None where it is missing or null."""
    value = entry.get(name) if none else entry[name]
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, no finite number")
    return value


def words(levels: Any) -> list[str]:
    """Levels as tables name them: the last part of a path."""
    if not isinstance(levels, list) or not all(isinstance(level, str) for level in levels):
        raise TypeError(f"levels is {levels!r}, no list of words")
    return [Path(level).name if "/" in level else level for level in levels]


def chain(levels: list[str]) -> str:
    return " <- ".join(levels) or "target alone"


def drafts(entry: Row) -> str:
    """Tokens per draft, one number for all levels or one per level, each with its threshold where the line says it:
    "12:0.2, 5:0.4". QSpec's draft length is "gamma"."""
    numbers = many(entry.get("num_draft_tokens", entry.get("gamma")))
    thresholds = many(entry.get("confidence_threshold"))
    if len(thresholds) == 1:
        thresholds *= len(numbers)
    if len(thresholds) != len(numbers):
        raise ValueError(f"{len(numbers)} draft lengths and {len(thresholds)} thresholds")
    return ", ".join("-" if one is None else f"{one}" + ("" if at is None else f":{at:g}")
                     for one, at in zip(numbers, thresholds, strict=True))


def ordinal(position: int) -> str:
    """How people are shown a place in a draft, which files count from 0: "1st" is the first token that was drafted."""
    place = position + 1
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"


def many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
