"""In what do two requests differ? The fields alone, one line, for whoever finds the results of another run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MOST, _LONGEST, _BEFORE = 6, 40, 8  # fields told, characters of a value, and those before the first that differs
_NOTHING = object()


def what_changed(was: Any, now: Any) -> str:
    """`dtype: "float32" -> "bfloat16"; versions.torch: "2.12" -> "2.13"`: what JSON values differ in, the empty text
    where they are equal. Fields inside fields have dots between, places in lists stand in brackets."""
    found = list(_differences(was, now, ""))
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(f"{name}: {_both(before, after)}" for name, before, after in found[:_MOST]) + more


def _differences(was: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            where = f"{name}.{key}" if name else str(key)
            yield from _differences(was.get(key, _NOTHING), now.get(key, _NOTHING), where)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for place, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from _differences(before, after, f"{name}[{place}]")
    elif was is _NOTHING or now is _NOTHING or was != now:
        yield name, was, now


def _both(before: Any, after: Any) -> str:
    """Both values, from shortly before their first difference where they are long."""
    texts = ["not said" if value is _NOTHING else json.dumps(value, ensure_ascii=False) for value in (before, after)]
    same = next((n for n, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), min(map(len, texts)))
    first = max(same - _BEFORE, 0) if max(map(len, texts)) > _LONGEST else 0
    return " -> ".join(_cut(text, first) for text in texts)


def _cut(text: str, first: int) -> str:
    begin, rest = "... " * (first > 0), text[first:]
    most = _LONGEST - len(begin)
    return begin + (rest if len(rest) <= most else f"{rest[: most - 4]} ...")
