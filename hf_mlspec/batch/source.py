"""Which lines does the input of a batch hold? JSON lines, or the rows of a parquet file, in pieces of some lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..evaluation.certificate_identity import hash_file
from ..serving.asked import known_fields
from .lines import ENVELOPE, OWN_FIELDS

Numbered = tuple[int, bytes]  # a line's place in the file, from 1, and its JSON


@dataclass(frozen=True)
class Piece:
    """Lines whose answers are one file."""

    index: int
    lines: list[Numbered]


class Source:
    """An input, `.parquet` or else JSON lines; empty lines are skipped.

    sha256: of the file. count: its lines. Raises ValueError for one that cannot be read or holds none.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        try:
            self.sha256 = hash_file(self.path)
        except OSError as error:
            raise ValueError(f"INPUT {path!r} cannot be read: {error.strerror or error}; give JSON lines or a "
                             ".parquet file") from error
        self.count = self._rows() if self._is_parquet else sum(1 for _ in self._json_lines())
        if not self.count:
            raise ValueError(f"INPUT {path!r} holds no lines; write a JSON object a line")

    @property
    def _is_parquet(self) -> bool:
        return self.path.suffix == ".parquet"

    def pieces(self, size: int) -> Iterator[Piece]:
        """All lines, in order, `size` at a time."""
        lines = self._parquet_rows() if self._is_parquet else self._json_lines()
        index = 0
        while found := list(islice(lines, size)):
            yield Piece(index, found)
            index += 1

    def _json_lines(self) -> Iterator[Numbered]:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # some editors begin a file with a byte order mark
                if line.strip():
                    yield number, line

    def _rows(self) -> int:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(self.path) as file:
                names = set(file.schema_arrow.names)
                count = file.metadata.num_rows
        except (ArrowException, OSError, ValueError) as error:  # names of columns that are no UTF-8, too
            raise ValueError(f"INPUT {str(self.path)!r} is no parquet file: {error}") from error
        if not names & {"prompt", "messages", "body"}:
            raise ValueError(f"INPUT {str(self.path)!r} has the columns {', '.join(sorted(names))}: name the one with "
                             "the prompts prompt, or messages for chats")
        return count

    def _parquet_rows(self) -> Iterator[Numbered]:
        """Rows without the columns that no request has, which may be no JSON, and without what is null."""
        from datasets import load_dataset

        rows = load_dataset("parquet", data_files=str(self.path), split="train", streaming=True)
        read = set(ENVELOPE).union(*(known_fields(own) for own in OWN_FIELDS.values()))
        for number, row in enumerate(rows, 1):
            kept = {name: _without_nulls(value) for name, value in row.items() if name in read and value is not None}
            yield number, json.dumps(kept, default=str).encode()


def _without_nulls(value: Any) -> Any:
    """Columns of structures give each row the fields of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
