"""How does a test let the k-th write, flush or rename of a file fail, in this process alone?

All that this project writes goes through few doors: files that are opened in Python, `os.fsync`, `os.replace`, and
the writers of safetensors and torch. Each is counted and, when its turn comes, fails: at once, or torn, with half of
what it was to write on the disk. Only files under one folder are counted.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

WORDS = "a fault on purpose"


class Faults:
    """Operations below `folder`, counted from 1. at: the one that fails, 0: none. torn: half of it is done. full: from
    then on the disk is full: all writes and flushes fail, and renames do not. said: what each was, for messages."""

    def __init__(self, folder: Path, at: int = 0, torn: bool = False, full: bool = False):
        self.folder, self.at, self.torn, self.full = str(folder.resolve()), at, torn, full
        self.said: list[str] = []
        self.failed = False

    @property
    def count(self) -> int:
        """Operations so far."""
        return len(self.said)

    def turn(self, what: str) -> bool:
        """Count an operation; whether it is the one that fails."""
        self.said.append(what)
        fails = self.count == self.at
        if self.full:
            fails = 0 < self.at <= self.count and what in ("write", "fsync")
        self.failed |= fails
        return fails

    def mine(self, path: Any) -> bool:
        """Whether it is a path below the folder."""
        with suppress(TypeError, ValueError):
            return os.path.abspath(os.fspath(path)).startswith(self.folder)
        return False

    def fail(self) -> None:
        raise OSError(errno.ENOSPC if self.full else errno.EIO, WORDS)


class _File:
    """A file of which writes are counted."""

    def __init__(self, file: Any, faults: Faults):
        self._file, self._faults = file, faults

    def write(self, data: Any) -> int:
        if self._faults.turn("write"):
            if self._faults.torn:
                self._file.write(data[: len(data) // 2])
                self._file.flush()
            self._faults.fail()
        return self._file.write(data)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing(faults: Faults) -> Iterator[Faults]:
    """Inside, the chosen operation fails."""
    with pytest.MonkeyPatch.context() as patch:
        opened = io.open

        def opens(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            found = opened(file, mode, *args, **options)
            return _File(found, faults) if set(mode) & set("wxa+") and faults.mine(file) else found

        patch.setattr(io, "open", opens)
        patch.setattr(builtins, "open", opens)
        for name in ("replace", "rename"):
            patch.setattr(os, name, _renaming(getattr(os, name), name, faults))
        patch.setattr(os, "fsync", _flushing(os.fsync, faults))
        patch.setattr(safetensors.torch, "serialize_file", _writing(safetensors.torch.serialize_file, 1, faults))
        patch.setattr(torch, "save", _writing(torch.save, 1, faults))
        yield faults


def _renaming(stock: Callable, name: str, faults: Faults) -> Callable:
    def rename(source: Any, goal: Any, **options: Any) -> None:
        if faults.mine(goal) and faults.turn(name):
            faults.fail()
        stock(source, goal, **options)

    return rename


def _flushing(stock: Callable, faults: Faults) -> Callable:
    def flush(file: Any) -> None:
        if faults.turn("fsync"):
            faults.fail()
        stock(file)

    return flush


def _writing(stock: Callable, place: int, faults: Faults) -> Callable:
    """Of a writer whose argument number `place` is a path."""

    def write(*args: Any, **options: Any) -> Any:
        if not faults.mine(args[place]) or not faults.turn("write"):
            return stock(*args, **options)
        if faults.torn:
            stock(*args, **options)
            os.truncate(args[place], os.path.getsize(args[place]) // 2)
        return faults.fail()

    return write
