"""Which blocks did an interrupted calibration finish? They wait in a folder, each written aside and renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoints.safetensors_file import checksums
from ..checkpoints.whole_file import written_whole

_IDENTITY = "calibration.json"
_REPORT, _CHECKSUMS = "report", "checksums"


class FinishedBlocks:
    """A folder of blocks of one calibration.

    identity: what its bits depend on, by name: settings, text and weights. ValueError where the folder holds blocks of
    another one, naming what differs, or files of something else.
    """

    def __init__(self, folder: str | os.PathLike, identity: dict[str, Any]) -> None:
        self.folder = Path(folder)
        file = self.folder / _IDENTITY
        self._identity = identity = json.loads(json.dumps(identity))
        if file.exists() and not self._is_empty(_stored(file), identity):
            _require_same(self.folder, _stored(file), identity)
            return
        if self.folder.exists() and (not self.folder.is_dir() or any(map(_is_other, self.folder.iterdir()))):
            raise ValueError(f"work folder {str(self.folder)!r} holds something else: name a new one")
        self.folder.mkdir(parents=True, exist_ok=True)
        with written_whole(file) as aside:
            aside.write_text(json.dumps(identity, indent=1), encoding="utf-8")

    def _is_empty(self, stored: dict[str, Any], identity: dict[str, Any]) -> bool:
        """Whether a run left nothing but its identity: another one may take the folder."""
        return bool(stored.keys() & identity.keys()) and not any(self.folder.glob("block_*"))

    def __contains__(self, index: int) -> bool:
        return self._file(index).exists()

    def read(self, index: int) -> tuple[dict[str, Tensor], list[dict]]:
        """The tensors of a finished block by their names in it, and what was reported of its layers. ValueError for
        a damaged file."""
        path = self._file(index)
        try:
            with safe_open(path, "pt") as file:
                tensors, told = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it, and its block is done again") from error
        try:
            sums, report = (json.loads((told or {})[name]) for name in (_CHECKSUMS, _REPORT))
        except (KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): remove it, and its block is done again") from error
        if checksums(tensors) != sums or not isinstance(report, list):
            raise ValueError(f"{path} is damaged: remove it, and its block is done again")
        return tensors, report

    def write(self, index: int, tensors: dict[str, Tensor], report: list[dict]) -> None:
        """Keep a block; whatever happens while it is written, it is there whole or not at all. ValueError where
        another calibration has taken the folder, which it may before the first block."""
        _require_same(self.folder, _stored(self.folder / _IDENTITY), self._identity)
        file = self._file(index)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        told = {_REPORT: json.dumps(report), _CHECKSUMS: json.dumps(checksums(whole))}
        with written_whole(file) as aside:
            save_file(whole, aside, metadata=told)

    def _file(self, index: int) -> Path:
        return self.folder / f"block_{index:04d}.safetensors"


def _is_other(file: Path) -> bool:
    """Whether a file is not what a run leaves that ended before its first block."""
    return not f"{file.name}.".startswith(f"{_IDENTITY}.")


def _stored(file: Path) -> dict[str, Any]:
    """The identity in a folder's file; ValueError for a damaged one."""
    try:
        stored = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): remove {file.parent}, and all is done again") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{file} is damaged (a {type(stored).__name__}): remove {file.parent}, and all is done again")
    return stored


def _require_same(folder: Path, stored: dict[str, Any], identity: dict[str, Any]) -> None:
    for name in sorted({*stored, *identity}):
        before, now = stored.get(name), identity.get(name)
        if before != now:
            raise ValueError(
                f"{str(folder)!r} holds blocks of a calibration with {name} {before!r}, now it is {now!r}: repeat "
                "that call to finish it, or remove the folder"
            )
