"""How is a trace stored in a JSON file, and which errors does a damaged file or another version give?"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...checkpoints.whole_file import written_whole
from .trace import SCHEMA, Round, Trace, TracedLevel, TracedModel, TracedRow

_HEAD = {
    "data": str, "prompts_sha256": str, "max_new_tokens": int, "batch_size": int, "target": dict, "levels": list,
    "origin": dict, "rows": list,
}  # fmt: skip
_LATER = ("draft_window", "draft_cache")  # of a level
_ROW = {"prompt_tokens": int, "new_tokens": int, "rounds": list}


def trace_to_dict(trace: Trace) -> dict[str, Any]:
    """The trace as JSON types: a round is [drafted, accepted] or [drafted, accepted, [inner rounds]]."""
    return {
        "schema": SCHEMA,
        **{name: getattr(trace, name) for name, kind in _HEAD.items() if kind in (str, int)},
        "target": asdict(trace.target),
        "levels": [asdict(level) for level in trace.levels],
        "origin": trace.origin,
        "rows": [{**vars(row), "rounds": [_plain(round) for round in row.rounds]} for row in trace.rows],
    }


def trace_from_dict(data: Any) -> Trace:
    """The trace of `trace_to_dict`; ValueError naming the first thing that is missing, invalid or contradictory."""
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError(f'this is not a trace: it has no "schema", expected {SCHEMA!r}')
    if data["schema"] != SCHEMA:
        raise ValueError(f"the schema is {data['schema']!r}, this version reads {SCHEMA!r}: record the trace again")
    head = _typed("the trace", data, _HEAD)
    rows = [_row(f"row {number}", row) for number, row in enumerate(head["rows"])]
    levels = [_traced(f"level {number}", level, TracedLevel) for number, level in enumerate(head["levels"])]
    target = _traced("the target", head["target"], TracedModel)
    return Trace(**{**head, "target": target, "levels": tuple(levels), "rows": tuple(rows)})


def write_trace(trace: Trace, file: str | os.PathLike[str]) -> None:
    """Write `file`, one line per row, under a temporary name first; folders are created."""
    path = Path(file)
    data = trace_to_dict(trace)
    rows = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in data.pop("rows"))
    head = json.dumps(data, indent=1)[:-2]  # without the brace that ends it
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as aside:
        aside.write_text(f'{head},\n "rows": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


def read_trace(file: str | os.PathLike[str]) -> Trace:
    """The trace in `file`. Raises OSError if it cannot be read, ValueError naming file and place if it is no valid
    trace.
    """
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{file}: not JSON, so not a trace or a damaged one ({error}); record it again") from error
    try:
        return trace_from_dict(data)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def rows_to_list(rows: list[TracedRow]) -> list[dict[str, Any]]:
    """Rows as JSON types, for a journal."""
    return [{**vars(row), "rounds": [_plain(round) for round in row.rounds]} for row in rows]


def rows_from_list(rows: list[Any]) -> list[TracedRow]:
    """The rows behind `rows_to_list`; ValueError naming the first odd one."""
    return [_row(f"row {number}", row) for number, row in enumerate(rows)]


def _plain(round: Round) -> list:
    return [round.drafted, round.accepted, *([[_plain(inner) for inner in round.inner]] if round.inner else [])]


def _row(name: str, row: Any) -> TracedRow:
    values = _typed(name, row, _ROW)
    rounds = [_round(f"{name}, round {number}", round) for number, round in enumerate(values["rounds"])]
    return TracedRow(**{**values, "rounds": tuple(rounds)})


def _round(name: str, round: Any) -> Round:
    whole = isinstance(round, list) and len(round) in (2, 3) and all(_is(value, int) for value in round[:2])
    if not whole or (len(round) == 3 and not isinstance(round[2], list)):
        raise ValueError(f"{name} is {_short(round)}, no [drafted, accepted] or [drafted, accepted, [inner rounds]]")
    below = round[2] if len(round) == 3 else []
    return Round(
        round[0], round[1], tuple(_round(f"{name}, inner round {number}", inner) for number, inner in enumerate(below))
    )


def _traced(name: str, data: Any, kind: type) -> Any:
    """A TracedModel or TracedLevel; sizes may be null, and what earlier versions did not record may be missing."""
    expected = {field.name: field.default for field in fields(kind)}
    types = {"name": str, "weights": str, "confidence_threshold": float, "in_target_cache": bool, "draft_cache": str}
    nullable = {field.name for field in fields(TracedModel)} - {"name"} | {"draft_cache"}
    left_out = {key for key in _LATER if isinstance(data, dict) and key not in data}
    left_out |= {key for key in nullable if _null(data, key)}
    asked = {key: types.get(key, int) for key in expected if key not in left_out}
    return kind(**_typed(name, data, asked))


def _null(data: Any, key: str) -> bool:
    return isinstance(data, dict) and data.get(key, 0) is None


def _typed(name: str, data: Any, types: dict[str, type]) -> dict[str, Any]:
    """The named entries of `data`, each of its type; what else is there belongs to nobody and is left out."""
    if not isinstance(data, dict):
        raise ValueError(f"{name} is {_short(data)}, no object")
    for key, kind in types.items():
        if key not in data:
            raise ValueError(f"{name} has no {key!r}")
        if not _is(data[key], kind):
            raise ValueError(f"{name}: {key!r} is {_short(data[key])}, no {kind.__name__}")
    return {key: data[key] for key in types}


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
