"""Where does a benchmark's file lie, and is each of its lines what its layout says?"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

MOST_SHOTS = 64  # examples kept of a train file; nobody asks for more, and train files are long


@dataclass(frozen=True)
class Source:
    """A data file that the user must download.

    names:   its possible names in the data folder; the first that exists is read.
    project: the project that publishes it, and its path there.
    layout:  its format.
    """

    names: tuple[str, ...]
    project: str
    layout: str

    def missing(self, folder: Path) -> str:
        return (f"{' or '.join(self.names)} is not in {folder}: put there {self.project}; layout: {self.layout} "
                f"(every file: README.md in {Path(__file__).parent})")

    def find(self, folder: Path) -> Path | None:
        return next((folder / name for name in self.names if (folder / name).exists()), None)

    def need(self, folder: Path) -> Path:
        path = self.find(folder)
        if path is None:
            raise FileNotFoundError(self.missing(folder))
        return path


class Record(dict):
    """One object of a file, which knows its place there."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.where = where

    def wrong(self, field: str, problem: str) -> ValueError:
        return ValueError(f"{self.where}, field {field!r}: {problem}")

    def check(self, **types: type) -> Record:
        """Raise ValueError unless every named field is there and of its type."""
        for field, wanted in types.items():
            if field not in self:
                raise self.wrong(field, f"missing; there are {', '.join(map(repr, self)) or 'none'}")
            if not isinstance(self[field], wanted) or (wanted is int and isinstance(self[field], bool)):
                raise self.wrong(field, f"{type(self[field]).__name__}, expected {wanted.__name__}")
        return self


class AbsentExample(dict):
    """Stands for an example of a train file that is not there: reading it says so, and asking for no shots is fine."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem

    def __getitem__(self, field: str) -> Any:
        raise FileNotFoundError(f"few-shot examples are asked for, but {self.problem}; "
                                "or run without examples: --num_fewshot 0")


def data_folder(data: str | os.PathLike[str] | None) -> Path:
    """The folder that the metadata names, or else the environment variable MLSPEC_DATA."""
    named = data or os.environ.get("MLSPEC_DATA")
    if not named:
        raise ValueError("no data folder: set MLSPEC_DATA=FOLDER, or give --metadata '{\"data\": \"FOLDER\"}'; what "
                         f"belongs into it is in README.md in {Path(__file__).parent}")
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"the data folder {folder} (MLSPEC_DATA, or \"data\" in the metadata) is not a folder")
    return folder


def test_split(items: list[dict[str, Any]], path: Path) -> datasets.Dataset:
    import datasets  # lm-eval's; those who read items alone need none

    if not items:
        raise ValueError(f"{path} holds no items")
    return datasets.Dataset.from_list([dict(item) for item in items])


def examples(source: Source, folder: Path, read: Callable[[Path, int], list[dict]]) -> list[dict]:
    """The first items of the train file, `read(path, most)`, then placeholders that raise when used: the errors of
    lm-eval name neither a missing or short file nor the remedy.
    """
    path = source.find(folder)
    found = [] if path is None else read(path, MOST_SHOTS)
    if path is None:
        problem = source.missing(folder)
    else:
        problem = f"{path} holds {len(found) or 'none'}"
        problem += f", and example {len(found) + 1} is asked for: say --num_fewshot {len(found)}" if found else ""
    return found + [AbsentExample(problem)] * (MOST_SHOTS - len(found))


def records(path: Path, most: int | None = None) -> list[Record]:
    """The JSON objects of a file with one a line (or of a .gz of such); ValueError names file, line and problem."""
    return [_record(f"{path}, line {number}", line) for number, line in islice(lines(path), most)]


def whole_record(path: Path) -> Record:
    """A file that is one JSON object."""
    return _record(str(path), path.read_bytes())


def labels(path: Path, values: tuple[str, ...], count: int, *, exactly: bool) -> list[int]:
    """The index of each line of a label file among `values`; it must have `count` lines, or no fewer."""
    found = list(lines(path))
    if len(found) < count or (exactly and len(found) > count):
        raise ValueError(f"{path} has {len(found)} lines, but its items are {count}: line n is the label of item n")
    for number, line in found[:count]:
        if line.decode(errors="replace").strip() not in values:
            raise ValueError(f"{path}, line {number}: {line[:40]!r} is no label; expected {' or '.join(values)}")
    return [values.index(line.decode().strip()) for _, line in found[:count]]


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, text) of every line that is not blank; ValueError where the file cannot be read to its end."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except (OSError, EOFError, zlib.error) as error:  # a folder, half a .gz, none
        raise ValueError(f"{path} cannot be read: {error}; fetch the file again") from error


def _record(where: str, text: bytes) -> Record:
    try:
        value = json.loads(text.decode("utf-8-sig"))
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise ValueError(f"{where}: no JSON object ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a {type(value).__name__}, expected a JSON object")
    return Record(where, value)
