"""Which systems does a plan compare, on which prompts, and can they be? The tables most plans have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hf_mlspec
from eval.plans.places import Places
from eval.plans.tables import PlanError
from hf_mlspec.evaluation import read_prompts

DTYPES = ("float32", "bfloat16", "float16")
_PACKING = ("group_size", "mode")
_TARGET = ("model", "dtype", "format", *_PACKING, "precision")


@dataclass(frozen=True)
class System:
    """How a model decodes. Strings are the plan's own words, with their {places}.

    model: a folder or a hub name, loaded in `dtype`, quantized while it loads where `format` says so.
    group_size, mode: of that format, as `MLSpecConfig` takes them.
    precision: activation bits of the target itself ("w4a16", "w4a8", "w4a4"), of a model with packed layers.
    levels, num_draft_tokens, confidence_threshold: as `generate` takes them.
    reference: the name of the system that this one's ids are held against. That of a system with levels is its target
        alone, and no id may differ.
    """

    name: str
    model: str
    dtype: str = "bfloat16"
    format: str | None = None
    group_size: int | None = None
    mode: str | None = None
    precision: str | None = None
    levels: list[str] = field(default_factory=list)
    num_draft_tokens: int | list[int] | None = None
    confidence_threshold: float | list[float] | None = None
    reference: str | None = None

    @property
    def target(self) -> dict[str, Any]:
        """What the system's target alone depends on."""
        return {name: value for name in _TARGET if (value := getattr(self, name)) is not None}

    @property
    def packing(self) -> dict[str, Any]:
        """What `MLSpecConfig` takes beside the format."""
        return {name: value for name in _PACKING if (value := getattr(self, name)) is not None}

    @property
    def asked(self) -> dict[str, Any]:
        """What its tokens depend on: all but the names."""
        options = ("num_draft_tokens", "confidence_threshold")
        more = {name: value for name in options if (value := getattr(self, name)) is not None}
        return {**self.target, **({"levels": self.levels, **more} if self.levels else {})}

    @property
    def speculation(self) -> dict[str, Any]:
        """The `speculation_config` of this system."""
        return {name: value for name, value in self.asked.items()
                if name in ("num_draft_tokens", "confidence_threshold")}


@dataclass(frozen=True)
class Prompts:
    """The first `count` prompts of a file; `batch_sizes`: rows decoded together, each a run."""

    name: str
    file: str
    count: int
    batch_sizes: list[int] = field(default_factory=list)


def check_systems(systems: list[System], places: Places, path: Path) -> None:
    """PlanError for a system that cannot be: folders that are not there, settings that do not go together."""
    by_name = {system.name: system for system in systems}
    for system in systems:
        where = f"{path}: [[systems]] {system.name!r}"
        if system.dtype not in DTYPES:
            raise PlanError(f"{where}: dtype is {system.dtype!r}, choose one of {', '.join(DTYPES)}")
        require_model(places.fill(system.model), f"{where}: model")
        for level in system.levels:
            if "/" in (filled := places.fill(level)):
                require_model(filled.removesuffix("@mxfp4"), f"{where}: levels")
        try:
            _check_settings(system)
        except (ValueError, TypeError) as error:
            raise PlanError(f"{where}: {error}") from error
        if system.reference is not None:
            _check_reference(system, by_name, where)


def _check_settings(system: System) -> None:
    if system.format is not None:
        hf_mlspec.MLSpecConfig(format=system.format, **system.packing)
    for name, value in system.packing.items() if system.format is None else ():
        raise ValueError(f"{name} is {value}, but there is no format: add format = \"int4\"")
    if not system.levels and system.num_draft_tokens is not None:
        raise ValueError("num_draft_tokens without levels: add levels, or leave it out")
    if not system.levels and system.confidence_threshold is not None:
        raise ValueError("confidence_threshold without levels: add levels, or leave it out")
    config = hf_mlspec.SpeculationConfig.of(system.speculation)
    for option in system.speculation:
        config.of_level(option, 0, len(system.levels))


def _check_reference(system: System, by_name: dict[str, System], where: str) -> None:
    other = by_name.get(system.reference)
    if other is None or other is system:
        names = ", ".join(repr(name) for name in by_name if name != system.name)
        raise PlanError(f"{where}: reference is {system.reference!r}, the other systems are {names or 'none'}")
    if not system.levels:
        return
    if other.levels:
        raise PlanError(f"{where}: reference {other.name!r} has levels of its own; name a system without")
    for key in _TARGET:
        mine, its = getattr(system, key), getattr(other, key)
        if mine != its:
            raise PlanError(f"{where}: reference {other.name!r} is not its target alone: {key} is {mine!r} here, "
                            f"{its!r} there")


def require_model(filled: str, where: str) -> None:
    """PlanError where `filled` can only be a folder and holds no model; a hub name, `owner/name`, is let through."""
    folder = Path(filled)
    if not filled.startswith((".", "/", "~")) and filled.count("/") == 1 and not folder.exists():
        return
    if not (folder / "config.json").is_file():
        raise PlanError(f"{where}: {filled} holds no config.json: give the folder of a model (--models says what "
                        "{models} stands for)")


def require_file(filled: str, where: str) -> Path:
    """The file; PlanError where there is none."""
    if not Path(filled).is_file():
        raise PlanError(f"{where}: {filled} is no file (--data says what {{data}} stands for)")
    return Path(filled)


def prompts_of(asked: Prompts, places: Places, where: str) -> list[str]:
    """The prompts; PlanError for a file that is not there, is none, or holds fewer than asked."""
    file = require_file(places.fill(asked.file), f"{where}: file")
    if asked.count < 1:
        raise PlanError(f"{where}: count is {asked.count}, it must be at least 1")
    try:
        found = read_prompts(file, asked.count)
    except ValueError as error:
        raise PlanError(f"{where}: {error}") from error
    if len(found) < asked.count:
        raise PlanError(f"{where}: {file} holds {len(found)} prompts, count is {asked.count}")
    return found
