"""Which answers of a batch are written? Numbered files in a folder that knows what it answers: nothing is twice."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..checkpoints.whole_file import written_whole
from ..evaluation.changed import what_changed
from ..evaluation.journal import Journal

_LEFT = re.compile(r"part-\d+\.jsonl\.[0-9a-f]{16}")  # a name of `written_whole`; others are not ours
_IDENTITY = "worker"  # the journal's item of what the first worker was


class OutputFolder:
    """The answers of one input, `part-00000.jsonl` and so on, and `job.jsonl`: the settings, and what is finished.

    A file appears whole, under its name, or not at all. Held by one process at a time; created where it does not
    exist. Raises ValueError for a folder of another job, naming what differs, one that another process holds, or one
    that holds something else.
    """

    def __init__(self, path: str, asked: dict[str, Any]) -> None:
        self.path = Path(path)
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / "job.jsonl").exists():
            raise ValueError(f"OUTPUT {path!r} holds other files: name a new folder, or one of this job")
        self._journal = Journal(self.path / "job.jsonl", asked, elsewhere="name another OUTPUT")
        for left in self.path.glob("part-*.jsonl.*"):
            if _LEFT.fullmatch(left.name):  # by a process that was killed while it wrote
                left.unlink()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def file(self, index: int) -> Path:
        """Where the answers of a piece are, or will be."""
        return self.path / f"part-{index:05d}.jsonl"

    def finished(self, index: int) -> dict[str, int] | None:
        """What was counted of a piece that is written; None where it is not, or where its file was removed."""
        key = self.file(index).name
        return self._journal[key] if key in self._journal and self.file(index).is_file() else None

    def write(self, index: int, lines: Iterable[dict[str, Any]], counts: dict[str, int]) -> None:
        """The answers of a piece: on the disk under another name first, then renamed. ValueError, saying what to do,
        where they cannot be written; nothing of them is left then."""
        place = self.file(index)
        try:
            with written_whole(place) as beside:
                beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            self._sync()
            if place.name not in self._journal:
                self._journal.add(place.name, counts)
        except OSError as error:
            raise ValueError(f"{place} cannot be written: {error.strerror or error}; make room, and give the same "
                             "command again: what is finished stays") from error

    def require_same(self, worker: dict[str, Any]) -> None:
        """Note what the first worker is; ValueError for another one with other weights, kernels or versions."""
        if _IDENTITY not in self._journal:
            self._journal.add(_IDENTITY, worker)
        elif parts := what_changed(self._journal[_IDENTITY], json.loads(json.dumps(worker))):
            raise ValueError(f"a worker differs from the one that answered first ({parts}): give all machines the "
                             "same model and versions, or name another OUTPUT")

    def _sync(self) -> None:
        """The folder's own entries."""
        place = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(place)
        finally:
            os.close(place)
