"""Where are measured costs kept? In a JSON file that names machine, versions and models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...checkpoints.whole_file import written_whole
from ...speculation.costs import PassCosts

CACHE_VARIABLE = "MLSPEC_CACHE"
_VERSION = 1


class NotAProfile(ValueError):
    """A file does not hold costs of this machine; the message says why."""


def cache_folder() -> Path:
    """Where costs are kept between processes: $MLSPEC_CACHE, else hf_mlspec in the user's cache folder. OSError for a
    user who has no home folder."""
    given, base = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    try:
        if given:
            return Path(given).expanduser()
        return (Path(base) if base else Path.home() / ".cache") / "hf_mlspec"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def cache_file(key: str) -> Path:
    """The file of one model's costs on one machine; see `identity.key_of`."""
    return cache_folder() / "costs" / f"{key}.json"


def can_be_kept() -> bool:
    """Whether the folder of costs can be written, or made where it is not there."""
    try:
        folder = cache_folder() / "costs"
        return os.access(next(one for one in (folder, *folder.parents) if one.exists()), os.W_OK)
    except OSError:
        return False


def write(path: Path, machine: dict[str, str], models: dict[str, tuple[str, PassCosts]]) -> None:
    """Write costs under their models' hashes, each with the model's name. OSError where the folder cannot be written.

    Of two processes the later one wins, and nobody reads half a file.
    """
    costs = {model: {"name": name, **found.to_dict()} for model, (name, found) in models.items()}
    write_json(path, {"mlspec_profile": _VERSION, "machine": machine, "models": costs})


def write_json(path: Path, said: dict[str, Any]) -> None:
    """Write a file beside its place and rename it. OSError where the folder cannot be written."""
    text = json.dumps(said, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read(path: Path, machine: dict[str, str]) -> dict[str, PassCosts]:
    """Costs by their models' hashes. NotAProfile for a file that is none, or is of another machine or version, with
    what differs; FileNotFoundError or NotADirectoryError where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # the same to a reader: there is no such file
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise NotAProfile(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("mlspec_profile") != _VERSION:
        raise NotAProfile(f"{path} is no profile of `mlspec tune` (version {_VERSION})")
    differs = differences(found.get("machine"), machine)
    if differs:
        raise NotAProfile(f"{path} was measured elsewhere: {'; '.join(differs)}")
    models = found.get("models")
    if not isinstance(models, dict):
        raise NotAProfile(f"{path} names no models")
    try:
        return {model: PassCosts.from_dict(costs) for model, costs in models.items()}
    except ValueError as error:
        raise NotAProfile(f"{path} is damaged: {error}") from error


def differences(given: Any, machine: dict[str, str]) -> list[str]:
    """What of a file's machine is not this one's, in words."""
    if not isinstance(given, dict):
        return ["it does not say where"]
    return [f"{name} {given.get(name)!r}, here {own!r}" for name, own in machine.items() if given.get(name) != own]
