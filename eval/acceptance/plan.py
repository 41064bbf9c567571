"""Which chains does a plan record, which drafts does it compare, on which prompts? And the chains' traces, batch by
batch, so that a killed run goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from eval.acceptance.pairs import Pair, PairUnit, pair_units
from eval.plans.identity import arithmetic, digest, fingerprint, level_weights
from eval.plans.models import Loaded, Models, check_levels
from eval.plans.places import Places
from eval.plans.systems import Prompts, System, check_systems, prompts_of
from eval.plans.tables import PlanError, check_name, read_table, read_tables, read_toml
from eval.records import machine
from eval.records.progress import Bars
from eval.records.writer import OTHER_RESULTS
from hf_mlspec.evaluation import Journal, Trace, record_trace


@dataclass(frozen=True)
class Plan:
    """Every [[systems]] and every [[pairs]] on every [[data]], greedily; `batch_size` prompts at a time where the data
    has no size."""

    name: str
    max_new_tokens: int = 128
    batch_size: int = 8
    systems: list = field(default_factory=list)
    pairs: list = field(default_factory=list)
    data: list = field(default_factory=list)

    def batch_of(self, data: Prompts) -> int:
        """Prompts of this data that are decoded together."""
        return (data.batch_sizes or [self.batch_size])[0]


@dataclass(frozen=True)
class Unit:
    """One trace of a plan. material: what its files hold, as fingerprints of weights and prompts."""

    system: System
    data: Prompts
    batch_size: int
    max_new_tokens: int
    prompts: list[str]
    material: dict[str, Any]

    @property
    def name(self) -> str:
        """Of its file and its journal."""
        return f"{self.system.name}-{self.data.name}".lower()

    @property
    def asked(self) -> dict[str, Any]:
        """What its rounds depend on, in the plan's own words."""
        return {**self.system.asked, "data": self.data.name, "file": self.data.file, "count": self.data.count,
                "max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size}

    @property
    def identity(self) -> dict[str, Any]:
        """What its rounds depend on: the same words may stand for other weights and prompts tomorrow."""
        return {**self.asked, **self.material}


def read_plan(path: Path) -> Plan:
    """The plan; PlanError, naming table and key, for what no plan can say."""
    plan = read_table(Plan, raw := read_toml(path), str(path))
    check_name(plan.name, str(path))
    tables = {"systems": System, "pairs": Pair, "data": Prompts}
    plan = dataclasses.replace(plan, **{key: read_tables(kind, raw, key, path) for key, kind in tables.items()})
    if not plan.systems and not plan.pairs:
        raise PlanError(f"{path}: no table [[systems]] and no table [[pairs]]")
    if not plan.data:
        raise PlanError(f"{path}: no table [[data]]")
    for where, value in (("max_new_tokens", plan.max_new_tokens), ("batch_size", plan.batch_size)):
        if value < 1:
            raise PlanError(f"{path}: {where} is {value}, it must be at least 1")
    for system in plan.systems:
        if not system.levels:
            raise PlanError(f"{path}: [[systems]] {system.name!r} has no levels, so nothing is accepted: add levels")
    for data in plan.data:
        if len(data.batch_sizes) > 1 or min(data.batch_sizes, default=1) < 1:
            raise PlanError(f"{path}: [[data]] {data.name!r}: batch_sizes is {data.batch_sizes}, give at most one, "
                            "of 1 or more: rounds do not depend on it")
    return plan


def units(plan: Plan, places: Places, path: Path) -> list[Unit]:
    """Every trace of the plan, those of one system behind each other.

    PlanError for folders and files that are not there or do not hold what is asked.
    """
    check_systems(plan.systems, places, path)
    prompts = _prompts(plan, places, path)
    hashes = {name: digest(texts) for name, texts in prompts.items()}
    found = []
    for system in plan.systems:
        weights = {"weights": fingerprint(Path(places.fill(system.model))),
                   "level_weights": level_weights(system, places)}
        found += [Unit(system, data, plan.batch_of(data), plan.max_new_tokens, prompts[data.name],
                       {**weights, "prompts": hashes[data.name]}) for data in plan.data]
    names = [unit.name for unit in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PlanError(f"{path}: {names.count(twice)} pairs of a system and a data set would be kept as {twice!r}, "
                        "in lower case: rename one")
    return found


def units_of_pairs(plan: Plan, places: Places, path: Path) -> list[PairUnit]:
    """Every pair of the plan on every data set; PlanError as `units`."""
    prompts = _prompts(plan, places, path)
    data = [(one, prompts[one.name], plan.batch_of(one)) for one in plan.data]
    return pair_units(plan.pairs, data, plan.max_new_tokens, places, path)


def _prompts(plan: Plan, places: Places, path: Path) -> dict[str, list[str]]:
    return {data.name: prompts_of(data, places, f"{path}: [[data]] {data.name!r}") for data in plan.data}


def record(todo: list[Unit], places: Places, *, device: str, folder: Path, progress: Bars,
           elsewhere: str = OTHER_RESULTS) -> Iterator[tuple[Unit, Trace]]:
    """The trace of every unit, in turn; finished batches are kept under `folder` and not decoded again; `elsewhere`
    is the remedy where those in it are of something else.

    PlanError, before anything is decoded, for levels that cannot draft for their target, and for prompts that its
    positions do not hold.
    """
    models = Models(places, device)
    for unit in todo:
        _check(unit, models.load(unit.system))
    bar = progress.add_task("prompts", total=sum(unit.data.count for unit in todo))
    for unit in todo:
        progress.update(bar, description=unit.name)
        before = sum(one.data.count for one in todo[: todo.index(unit)])
        trace = _record(unit, models, folder, elsewhere, partial(progress.advance, bar))
        progress.update(bar, completed=before + unit.data.count)
        yield unit, trace


def _check(unit: Unit, loaded: Loaded) -> None:
    check_levels(unit.system, loaded)
    longest = max(len(loaded.encode(prompt)) for prompt in unit.prompts)
    if loaded.positions is not None and longest + unit.max_new_tokens > loaded.positions:
        raise PlanError(f"[[data]] {unit.data.name!r}: its longest prompt has {longest} tokens, which with "
                        f"{unit.max_new_tokens} new ones exceed the {loaded.positions} positions of "
                        f"{unit.system.name!r}: lower max_new_tokens")


def journal_of(unit: Unit, folder: Path) -> Path:
    """Where its finished batches are kept."""
    return folder / f"{unit.name}.jsonl"


class _Batches(Journal):
    """Calls `done` with the rows of each batch."""

    done: Callable[[int], None]

    def add(self, key: str, value: Any) -> None:
        super().add(key, value)
        self.done(len(value))


def _record(unit: Unit, models: Models, folder: Path, elsewhere: str, done: Callable[[int], None]) -> Trace:
    loaded = models.load(unit.system)
    asked = {**unit.identity, "arithmetic": arithmetic(models.device)}
    try:
        with _Batches(journal_of(unit, folder), asked, elsewhere=elsewhere) as journal:
            journal.done = done
            return record_trace(
                loaded.model, loaded.tokenizer, unit.prompts, loaded.levels, max_new_tokens=unit.max_new_tokens,
                speculation_config=unit.system.speculation, batch_size=unit.batch_size, data=unit.data.name,
                origin={"commit": machine.card()["commit"], "asked": unit.asked, **unit.material},
                journal=journal,
            )
    except ValueError as error:
        raise PlanError(f"[[systems]] {unit.system.name!r} on {unit.data.name}: {error}") from error
