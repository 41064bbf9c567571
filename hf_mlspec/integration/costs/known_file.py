"""What did an earlier process know of a chain, so that the first call of this one may begin without its levels?

A JSON file for the levels as calls name them, below one target and with one set of options, in the folder `known`
beside that of the costs: what the chain is like, and of which models its costs are. It holds no costs, which are in
their own files, no text and no weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...engines.built import device_of
from ...engines.engine import Engine
from ...nn.replace import is_view
from ...speculation.memory import LevelCosts
from ..json_object import read_object
from ..levels.words import as_words, parse_level
from .file import cache_folder, differences, write_json
from .identity import chain_of, machine_of, model_of
from .probe import costs_of_hash

_VERSION = 1
_MOST_SECONDS = 1e5  # that building levels may take: more is no measurement
_FOLDER = "known"


@dataclass(frozen=True)
class Given:
    """What a call was given: levels and tokenizers as they came, and options in words."""

    levels: Sequence[Any]
    tokenizers: Sequence[Any] | None
    tokenizer: Any
    options: tuple[str, ...]

    @property
    def objects(self) -> tuple:
        """Levels and tokenizers."""
        return (*self.levels, *(self.tokenizers or ()), self.tokenizer)

    @property
    def asked(self) -> tuple:
        """What tells it from what other calls of this process were given."""
        words = [id(one) if isinstance(one, PreTrainedModel) else (type(one), os.fspath(one)) for one in self.levels]
        return (*self.options, id(self.tokenizer), tuple(map(id, self.tokenizers or ())), *words)


def file_of(target: Engine, given: Given) -> Path | None:
    """Where the chain of these levels is described; None where a level, or the target, has no name that lasts."""
    name = getattr(target.model.config, "name_or_path", "")
    try:
        levels = [_named(level, target.model) for level in as_words(given.levels)]
        if not name or None in levels:
            return None
        tokenizers = [_tokenizer(one) for one in (given.tokenizer, *(given.tokenizers or ()))]
        said = (name, given.options, levels, tokenizers)
        return cache_folder() / _FOLDER / f"{chain_of(target, False, said)}.json"
    except (OSError, ValueError):  # no home folder, kernels that cannot be told from others, a word that is none
        return None


def any_known() -> bool:
    """Whether earlier processes left descriptions of chains."""
    try:
        return (cache_folder() / _FOLDER).is_dir()
    except OSError:
        return False


def read_description(path: Path, target: Engine) -> dict[str, Any] | None:
    """What `write_description` wrote; None where there is no such file, or one of another machine, or a damaged one:
    then all levels are built, as those of a chain that was never seen."""
    try:
        found = read_object(path)
        if found["mlspec_known"] != _VERSION or differences(found["machine"], machine_of(target)):
            return None
        return found["chain"] if _says_all(found["chain"]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _says_all(chain: dict[str, Any]) -> bool:
    """Whether a description has what is read of it, in the kinds that it was written in. KeyError, TypeError or
    AttributeError for some that have not."""
    names, kinds, levels = chain["names"], chain["kinds"], chain["levels"]
    count = len(names) * (2 if chain["seen"] else 1)
    hash(as_tuple(chain["key"]))
    return (
        len(levels) == count > 0 == len(kinds) - len(names)
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and all(isinstance(reads, bool) and _is_count(positions) for reads, positions in kinds)
        and all(isinstance(chain[name], bool) for name in ("follows", "captured"))
        and isinstance(chain["key"], list)
        and _is_count(chain["seen"])
        and 0 <= chain["seconds"] <= _MOST_SECONDS
        and all(_is_level(one, count) for one in levels)
    )


def _is_level(one: dict[str, Any], count: int) -> bool:
    twin, model = one["twin"], one["model"]
    return (
        0 <= one["prior"] <= 1
        and all(isinstance(one[name], bool) for name in ("own_cache", "joined"))
        and isinstance(one["name"], str)
        and isinstance(model, (str, type(None)))
        and _is_count(one["most_slots"])
        and _is_count(twin)
        and (twin is None or twin < count)
    )


def _is_count(said: Any) -> bool:
    return said is None or (type(said) is int and said >= 0)


def as_tuple(said: Any) -> Any:
    """Lists as JSON has them, as the tuples that they were."""
    return tuple(map(as_tuple, said)) if isinstance(said, list) else said


def write_description(path: Path, target: Engine, chain: dict[str, Any]) -> None:
    """Keep what a chain is like; a folder that cannot be written was told where costs are kept."""
    before = read_description(path, target)
    if before is not None and {**before, "seconds": 0} == {**chain, "seconds": 0}:
        return
    with suppress(OSError):
        write_json(path, {"mlspec_known": _VERSION, "machine": machine_of(target), "chain": chain})


def described(told: Sequence[LevelCosts], runners: Sequence[Engine | None], replayed: bool) -> list[dict[str, Any]]:
    """What a controller was told of levels, in plain numbers: of costs the model that they are of. runners: of the
    levels, of which `told` has all once, or a second time with a draft window."""
    found = []
    for at, level in enumerate(told):
        runner = runners[at % len(runners)]
        found.append({
            "name": level.name, "prior": level.prior, "own_cache": level.own_cache, "joined": level.joined,
            "twin": level.twin, "model": None if runner is None else model_of(runner, replayed),
            "most_slots": None if level.costs is None else level.costs.most_slots,
        })  # fmt: skip
    return found


def told_of(target: Engine, described: list[dict], replayed: bool, profile: Any) -> list[LevelCosts] | None:
    """The levels of `described` with the costs that are kept of them; None where those of one are not."""
    found = []
    for one in described:
        costs = None
        if one["model"] is not None:
            costs = costs_of_hash(target, one["model"], replayed, profile)
            if costs is None:
                return None
            costs = replace(costs, most_slots=one["most_slots"])
        found.append(LevelCosts(one["name"], costs, one["prior"], one["own_cache"], one["joined"], one["twin"]))
    return found


def _named(level: Any, target: PreTrainedModel) -> list | None:
    """What tells a level from others, in any process; None for what is not on this machine. A folder is told by its
    files, a model by what it is made of."""
    if isinstance(level, PreTrainedModel):
        name = getattr(level.config, "name_or_path", "")
        place = [str(device_of(level)), str(level.dtype), is_view(level, target)]
        return [type(level).__name__, name, level.config.to_json_string(), *place, str(level)]
    path = parse_level(level).path
    if path is None:
        return [level]
    if not os.path.exists(path):
        return None
    files = [Path(path)] if os.path.isfile(path) else sorted(Path(path).iterdir())
    return [level, *([file.name, (told := file.stat()).st_size, told.st_mtime_ns] for file in files)]


def _tokenizer(one: Any) -> list | None:
    return None if one is None else [type(one).__name__, getattr(one, "name_or_path", ""), len(one)]

