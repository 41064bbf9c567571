"""Where do results go? JSON lines that say what was asked, on which machine and at which commit, kept at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.records import machine
from hf_mlspec.evaluation import LineFile, what_changed, whole_lines

OTHER_RESULTS = "pass another folder as --results"  # of a plan, whose lines and journals lie there


class ResultsError(ValueError):
    """One sentence: the file, and what is wrong with it."""


class Results:
    """The lines of one run; each is on disk before `add` returns.

    file:   made, with its folders, where it does not exist, and removed where it got no line. A last line without its
            end, as a killed process leaves it, is cut off.
    name:   of the run, in every line.
    device: whose card every line carries (eval.machine.card).
    elsewhere: the remedy where the file holds results of something else.
    ResultsError for a file that holds something else, and while another process writes it.
    """

    def __init__(self, file: Path, name: str, device: str = "cpu", *,
                 elsewhere: str = "name another file") -> None:
        self.file, self.name, self.device, self.elsewhere = file, name, device, elsewhere
        try:
            self._lines = LineFile(file)
        except BlockingIOError as error:
            raise ResultsError(f"{error}: wait for it") from error
        except OSError as error:
            raise ResultsError(f"{file} cannot be written ({error.strerror}): name another folder") from error
        try:
            if not self._lines.lies_at(file):
                raise ResultsError(f"{file} was removed by another process just now: run again")
            whole = _whole(file, self._lines.read())
            self.rows = _parse(file, whole)
            self._lines.cut(len(whole))
        except BaseException:
            self._lines.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        if not LineFile.locks:  # Windows, which removes no open file
            self._lines.close()
        if not self.rows:
            self.file.unlink(missing_ok=True)  # while the lock is held; who waits for it sees that the file went
        self._lines.close()

    def add(self, kind: str, values: dict[str, Any], *, asked: dict[str, Any] | None = None,
            replayed: bool = False) -> dict[str, Any]:
        """Keep one line of this kind; `asked`: what the values depend on, `replayed`: from a trace, not a model."""
        line = {"kind": kind, "name": self.name, **values, **({"asked": asked} if asked is not None else {}),
                **({"replayed": True} if replayed else {}), "machine": machine.card(self.device)}
        self.rows.append(json.loads(self._lines.append(line, allow_nan=False)))
        return self.rows[-1]

    def find(self, kind: str, asked: dict[str, Any], **identity: Any) -> dict[str, Any] | None:
        """The line that answers this already, or None; ResultsError where it was asked in another way."""
        for line in self.rows:
            if line["kind"] == kind and line["name"] == self.name and identity.items() <= line.items():
                self._check_asked(line.get("asked", {}), json.loads(json.dumps(asked)), {"kind": kind, **identity})
                return line
        return None

    def _check_asked(self, was: dict[str, Any], now: dict[str, Any], identity: dict[str, Any]) -> None:
        if parts := what_changed(was, now):
            what = ", ".join(f"{name} {value}" for name, value in identity.items())
            raise ResultsError(f"{self.file} holds the results of another run of {what} ({parts}): {self.elsewhere}, "
                               "or remove this file")


def read_results(file: Path) -> list[dict[str, Any]]:
    """All finished lines of a file, which another process may be writing; ResultsError for other files."""
    try:
        return _parse(file, _whole(file, file.read_bytes()))
    except OSError as error:
        raise ResultsError(f"{file} cannot be read: {error.strerror}") from error


def _whole(file: Path, text: bytes) -> bytes:
    whole = whole_lines(text)
    if not whole and text and not b'{"kind": '.startswith(text[:9]):
        raise ResultsError(f"{file} holds no results: name another file")
    return whole


def _parse(file: Path, text: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # thousands of brackets
            raise ResultsError(f"{file}, line {number}: no JSON ({error}): name another file") from error
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise ResultsError(f"{file}, line {number}: no result, as it has no kind: name another file")
        rows.append(row)
    return rows
