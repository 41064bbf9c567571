"""Which items of a long run are finished? A file that survives a killed process: nothing is computed twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .changed import what_changed
from .line_file import LineFile, whole_lines

_OPENING = b'{"asked": '


class Journal:
    """JSON lines: first what was asked, then one line per finished item, `{"key": ..., "value": ...}`.

    A line reaches the disk before `add` returns (one write, fsync). A process killed inside a write leaves a last line
    without its end; the next one cuts that line off, its item was never reported as finished.

    file:   made, with its folders, where it does not exist.
    asked:  what the items depend on (model, levels, settings), as JSON; a journal of something else is refused, so
            that results of two settings never meet in one table.
    elsewhere: the remedy where the file cannot be used, such as the option that names another one.
    Raises ValueError for a file that is another journal or none, naming what differs, for a path where no file can be,
    and while another process writes it.
    """

    def __init__(self, file: str | os.PathLike[str], asked: dict[str, Any], *,
                 elsewhere: str = "name another file") -> None:
        self.path, self.asked, self._elsewhere = Path(file), json.loads(json.dumps(asked)), elsewhere
        self._items: dict[str, Any] = {}
        try:
            self._file = LineFile(self.path)
        except BlockingIOError as error:
            raise ValueError(f"{error}: wait for it, or {elsewhere}") from error
        except OSError as error:  # a folder, a path below a file, a folder that is not one's own
            raise ValueError(f"{self.path} cannot be written as a journal ({error.strerror}): name a file in a folder "
                             "that can be written") from error
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def items(self) -> dict[str, Any]:
        """What is finished, in the order it was; a copy."""
        return dict(self._items)

    def add(self, key: str, value: Any) -> None:
        """An item is finished; ValueError where it was before: computing it again is a mistake of the caller."""
        if not isinstance(key, str):
            raise TypeError(f"{self.path}: the key of an item is a str, got {key!r}")
        if key in self._items:
            raise ValueError(f"{self.path}: item {key!r} is finished already; ask `key in journal` before computing")
        self._file.append({"key": key, "value": value})
        self._items[key] = json.loads(json.dumps(value))

    def close(self) -> None:
        """Let another process have the file."""
        self._file.close()

    def _read(self) -> None:
        text = self._file.read()
        whole = whole_lines(text)
        lines = whole.splitlines()
        if lines:
            self._check_asked(self._parse(1, lines[0]))
        elif not _OPENING.startswith(text[: len(_OPENING)]):
            raise ValueError(f"{self.path} does not begin with what was asked, so it is no journal: "
                             f"{self._elsewhere}")
        for number, line in enumerate(lines[1:], 2):
            entry = self._parse(number, line)
            if set(entry) != {"key", "value"} or not isinstance(entry["key"], str) or entry["key"] in self._items:
                raise ValueError(f"{self.path}, line {number}: no finished item, or one twice; "
                                 f"{self._elsewhere}")
            self._items[entry["key"]] = entry["value"]
        self._file.cut(len(whole))
        if not lines:
            self._file.append({"asked": self.asked})

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path}, line {number}: no JSON ({error}): no journal, or a damaged one; "
                f"{self._elsewhere}"
            ) from error
        if not isinstance(entry, dict):
            raise ValueError(f"{self.path}, line {number}: a {type(entry).__name__}, no object; {self._elsewhere}")
        return entry

    def _check_asked(self, first: dict[str, Any]) -> None:
        if set(first) != {"asked"} or not isinstance(first["asked"], dict):
            raise ValueError(f"{self.path} does not begin with what was asked, so it is no journal: "
                             f"{self._elsewhere}")
        if parts := what_changed(first["asked"], self.asked):
            raise ValueError(f"{self.path} holds the results of another run ({parts}): {self._elsewhere}, or remove "
                             "this one")
