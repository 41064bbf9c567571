"""Which results lie in these files? Lines of JSON, whoever wrote them, as records of one form; nothing lost unsaid."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.report.kinds import kind_of, records_of

Row = dict[str, Any]


class ReportError(ValueError):
    """A file that cannot be read as results; says which line, and what to do."""


@dataclass(frozen=True)
class Machine:
    """What was the same for all lines of one part of a report: numbers of two of these are never compared."""

    processor: str
    cores: int | None
    threads: int | None
    torch: str
    transformers: str

    @classmethod
    def of(cls, card: Any) -> Machine:
        card = card if isinstance(card, dict) else {}
        counts = [card[name] if isinstance(card.get(name), int) else None for name in ("cores", "threads")]
        processor, torch, transformers = (str(card.get(name) or "unknown")
                                          for name in ("processor", "torch", "transformers"))
        return cls(processor, *counts, torch, transformers)

    def __str__(self) -> str:
        if self.processor == "unknown":
            return "no machine named"
        counted = [f"{value} {one if value == 1 else one + 's'}" for value, one in
                   ((self.cores, "core"), (self.threads, "thread")) if value is not None]
        return ", ".join([self.processor, *counted, f"torch {self.torch}", f"transformers {self.transformers}"])


@dataclass
class Results:
    """Records of all files, and what is to be said about what was not taken.

    records: one dict each, with "kind", "machine" (a Machine), "commit", "run", "time", "replayed" and the kind's own.
    unknown: kind -> lines; superseded: kind -> lines of which a later one answers the same question.
    """

    records: list[Row] = field(default_factory=list)
    counted: Counter = field(default_factory=Counter)
    unknown: Counter = field(default_factory=Counter)
    superseded: Counter = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)
    files: int = 0
    lines: int = 0


def read(files: list[Path]) -> Results:
    """All lines of all files; ReportError for a file without lines, for a line that is no JSON object, or where no
    line at all is a result."""
    if not files:
        raise ReportError("no files: name the JSON lines of earlier runs, for instance results/*.jsonl")
    found, newest = Results(files=len(files)), {}
    for file in files:
        for number, entry in _entries(file, found):
            found.lines += 1
            _take(entry, file, number, found, newest)
    found.records = list(newest.values())
    if not found.records:
        kinds = ", ".join(sorted(found.unknown)) or "nothing"
        raise ReportError(f"{_named(files)}: none of the {found.lines} lines is a result this report knows ({kinds}); "
                          + ("; ".join(found.remarks) or "see eval/report/kinds.py for the kinds"))
    return found


def _named(files: list[Path]) -> str:
    return ", ".join(map(str, files[:4])) + (f" and {len(files) - 4} more" if len(files) > 4 else "")


def _entries(file: Path, found: Results) -> Iterator[tuple[int, Row]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{file} cannot be read: {error}") from error
    lines = text.splitlines()
    if not any(line.strip() for line in lines):
        raise ReportError(f"{file} is empty: the run that should have filled it wrote nothing; leave the file out")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # thousands of brackets
            if number == len(lines) and not text.endswith("\n"):
                found.remarks.append(f"{file.name}, line {number}: half a line, as an interrupted write leaves it; "
                                     "skipped")
                continue
            raise ReportError(f"{file}, line {number}: no JSON ({error}); results are JSON lines, one object a line: "
                              "leave this file out, or remove the line") from error
        if not isinstance(entry, dict):
            raise ReportError(f"{file}, line {number}: a {type(entry).__name__}, and a result is a JSON object")
        yield number, entry


def _take(entry: Row, file: Path, number: int, found: Results, newest: dict[tuple, Row]) -> None:
    kind = kind_of(entry)
    if kind is None:
        found.unknown[str(entry.get("kind", "without a kind: " + ", ".join(sorted(entry)[:4])))] += 1
        return
    try:
        records = records_of(kind, entry)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        found.remarks.append(f"{file.name}, line {number}: a line of kind {kind!r} that cannot be read "
                             f"({type(error).__name__}: {error}); skipped")
        return
    found.counted[kind] += 1
    about = _about(entry, file)
    for record in records:
        record |= about
        question = tuple(map(str, record.pop("key")))
        key = (about["machine"], about["commit"], about["run"], about["replayed"], record["kind"], question)
        if key in newest:
            found.superseded[record["kind"]] += 1
        if key not in newest or newest[key]["time"] <= record["time"]:
            newest.pop(key, None)
            newest[key] = record


def _about(entry: Row, file: Path) -> Row:
    """Where a line comes from. Programs that name no run are named after their model, else their file."""
    card = entry.get("machine", entry)
    asked = entry.get("asked") if isinstance(entry.get("asked"), dict) else {}
    model = entry.get("model") or asked.get("model") or asked.get("target")
    run = entry.get("name") or (Path(str(model)).name if model not in (None, "None") else file.stem)
    card_of = card if isinstance(card, dict) else {}
    return {"machine": Machine.of(card), "commit": str(card_of.get("commit") or "unknown"), "run": str(run),
            "time": str(card_of.get("time") or ""), "replayed": entry.get("replayed") is True}
