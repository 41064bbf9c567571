"""What did earlier processes learn of a chain: how often its drafts are kept, and how far rounds are from their costs?

A JSON file a chain, in the folder `learned` beside that of the costs. It holds no text and no weights. It is written
behind a call, at most every few seconds, and when the process ends.
"""

from __future__ import annotations

import atexit
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from ...engines.engine import Engine
from ...speculation.memory import Memory
from ..json_object import read_object
from .file import cache_folder, differences, write_json
from .identity import chain_of, machine_of

_VERSION = 1
_SECONDS = 10.0  # between two times that a chain's file is written


@dataclass
class Learned:
    """The file of one chain. levels: how many a controller knows of."""

    path: Path
    machine: dict[str, str]
    levels: int
    memory: Memory | None = None
    written: str = ""
    last: float = field(default_factory=monotonic)

    def read(self) -> Memory | None:
        """What the file holds; None where there is none, or one of another machine, or a damaged one: then everything
        is learned anew, as of a chain that was never seen."""
        try:
            found = read_object(self.path)
            if found["mlspec_learned"] != _VERSION or differences(found["machine"], self.machine):
                return None
            memory = Memory.from_dict(found["memory"], self.levels)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        self.written = json.dumps(memory.to_dict())
        return memory

    def write(self) -> None:
        """Write what is new; a folder that cannot be written was told where costs are kept."""
        self.last = monotonic()
        told = self.memory.to_dict()
        if (text := json.dumps(told)) == self.written or not told["pairs"]:
            return
        try:
            write_json(self.path, {"mlspec_learned": _VERSION, "machine": self.machine, "memory": told})
            self.written = text
        except OSError:
            pass


_open: dict[Path, Learned] = {}
_opening = threading.Lock()


def learned_of(target: Engine, replayed: bool, said: Any, levels: int) -> Learned | None:
    """The file of a chain below this target; None for a target that was never saved, and so has no name.

    replayed: its rounds are captured. said: what tells the chain from others. levels: how many a controller knows of.
    """
    name = getattr(target.model.config, "name_or_path", "")
    if not name:
        return None
    try:
        path = cache_folder() / "learned" / f"{chain_of(target, replayed, (name, said))}.json"
        machine = machine_of(target)
    except OSError:  # a user without a home folder, or kernels that cannot be told from others
        return None
    with _opening:
        return _open.setdefault(path, Learned(path, machine, levels))


def write_what_is_due(least: float = _SECONDS) -> None:
    """Write the files of chains that learned something and were not written for so many seconds."""
    now = monotonic()
    for one in list(_open.values()):
        if one.memory is not None and now - one.last >= least:
            one.write()


atexit.register(write_what_is_due, 0.0)
