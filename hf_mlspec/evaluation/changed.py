"""In what do two requests differ? The fields alone, one line, for whoever finds the results of another run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MOST, _LONGEST = 6, 40  # fields told, characters of a value
_NOTHING = object()


def what_changed(was: Any, now: Any) -> str:
    """`dtype: "float32" -> "bfloat16"; versions.torch: "2.12" -> "2.13"`: what JSON values differ in, the empty text
    where they are equal. Fields inside fields have dots between, places in lists stand in brackets."""
    found = list(_differences(was, now, ""))
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(f"{name}: {_told(before)} -> {_told(after)}" for name, before, after in found[:_MOST]) + more


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


def _told(value: Any) -> str:
    if value is _NOTHING:
        return "not said"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
