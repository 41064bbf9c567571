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
    """JSON lines: first the settings, then one line per finished item, `{"key": ..., "value": ...}`.

    A line is on disk before `add` returns (one write, fsync). A process killed during a write leaves an incomplete
    last line; the next process removes it, and its item counts as not finished.

    file:   created, with its folders, if it does not exist.
    asked:  the settings that the items depend on (model, levels, ...), as JSON; a journal with other settings is an
        error, so that results of two settings never mix.
    elsewhere: the remedy if the file cannot be used, such as the option that names another one.
    Raises ValueError if the file is another journal or none, naming the difference, if the path cannot be written, and
    while another process writes it.
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
        """The finished items, in order; a copy."""
        return dict(self._items)

    def add(self, key: str, value: Any) -> None:
        """Store a finished item; ValueError if it was stored before."""
        if not isinstance(key, str):
            raise TypeError(f"{self.path}: the key of an item is a str, got {key!r}")
        if key in self._items:
            raise ValueError(f"{self.path}: item {key!r} is finished already; check `key in journal` before computing")
        self._file.append({"key": key, "value": value})
        self._items[key] = json.loads(json.dumps(value))

    def borrow(self, file: Path) -> None:
        """Count as finished, too, what another journal of the same settings holds, which its process may be writing.
        ValueError as for this one; a file with nothing in it is none yet."""
        path, self.path, own = self.path, file, self._items
        self._items = {}
        try:
            self._take(whole_lines(file.read_bytes()).splitlines())
        finally:
            found, self.path, self._items = self._items, path, own
        self._items = found | own

    def close(self) -> None:
        """Unlock the file for other processes."""
        self._file.close()

    def _read(self) -> None:
        text = self._file.read()
        whole = whole_lines(text)
        lines = whole.splitlines()
        if not lines and not _OPENING.startswith(text[: len(_OPENING)]):
            raise ValueError(f"{self.path} is not a journal, it does not begin with settings: {self._elsewhere}")
        self._take(lines)
        self._file.cut(len(whole))
        if not lines:
            self._file.append({"asked": self.asked})

    def _take(self, lines: list[bytes]) -> None:
        """The items of a journal's lines."""
        if lines:
            self._check_asked(self._parse(1, lines[0]))
        for number, line in enumerate(lines[1:], 2):
            entry = self._parse(number, line)
            if set(entry) != {"key", "value"} or not isinstance(entry["key"], str) or entry["key"] in self._items:
                raise ValueError(f"{self.path}, line {number}: no finished item, or one twice; "
                                 f"{self._elsewhere}")
            self._items[entry["key"]] = entry["value"]

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path}, line {number}: no JSON ({error}): not a journal, or a damaged one; {self._elsewhere}"
            ) from error
        if not isinstance(entry, dict):
            raise ValueError(f"{self.path}, line {number}: a {type(entry).__name__}, no object; {self._elsewhere}")
        return entry

    def _check_asked(self, first: dict[str, Any]) -> None:
        if set(first) != {"asked"} or not isinstance(first["asked"], dict):
            raise ValueError(f"{self.path} is not a journal, it does not begin with settings: {self._elsewhere}")
        if parts := what_changed(first["asked"], self.asked):
            raise ValueError(f"{self.path} holds the results of another run ({parts}): {self._elsewhere}, or remove "
                             "this file")
