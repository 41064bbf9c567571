"""What does a plan of eval/quality ask for? Systems, and what each is measured on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.plans.places import Places
from eval.plans.systems import Prompts, System, check_systems, prompts_of, require_file
from eval.plans.tables import PlanError, check_name, read_table, read_tables, read_toml

PARTS = {
    "tasks": "lm-eval tasks, item by item against the reference",
    "fidelity": "greedy continuations against those of the reference",
    "perplexity": "of the systems without levels; levels do not change it",
    "probabilities": "of the same tokens under two systems (QSpec, Figure 2)",
}


@dataclass(frozen=True)
class Task:
    """An lm-eval task; what is left out is the task's own. max_gen_toks: new tokens of an answer at most."""

    task: str
    num_fewshot: int | None = None
    limit: int | None = None
    max_gen_toks: int | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """Its settings."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Text:
    """A text whose first `lines` lines (None: all) are scored in windows of `max_length` tokens every `stride`."""

    name: str
    file: str
    lines: int | None = None
    max_length: int = 1024
    stride: int = 512


@dataclass(frozen=True)
class Pair:
    """Two systems without levels, and the [[fidelity]] data on which the reference's own tokens are scored."""

    system: str
    reference: str
    data: str


@dataclass(frozen=True)
class Plan:
    """One run. seed: of the bootstrap and of the sample of points; max_new_tokens: of fidelity."""

    name: str
    systems: list = field(default_factory=list)
    seed: int = 0
    batch_size: int = 8
    max_new_tokens: int = 128
    tasks: list = field(default_factory=list)
    fidelity: list = field(default_factory=list)
    perplexity: list = field(default_factory=list)
    probabilities: list = field(default_factory=list)

    def system(self, name: str) -> System:
        """The system of this name."""
        return next(system for system in self.systems if system.name == name)

    def data(self, name: str) -> Prompts:
        """The [[fidelity]] data of this name."""
        return next(data for data in self.fidelity if data.name == name)

    def sizes(self, data: Prompts) -> list[int]:
        """The batch sizes of this data: its own, or the plan's."""
        return data.batch_sizes or [self.batch_size]

    @property
    def in_order(self) -> list[System]:
        """The systems, each after its reference."""
        found: list[System] = []
        while len(found) < len(self.systems):
            known = [None, *(system.name for system in found)]
            ready = [system for system in self.systems if system not in found and system.reference in known]
            if not ready:
                raise ValueError("references go in a circle")  # which read_plan refuses
            found += ready
        return found


@dataclass(frozen=True)
class Material:
    """What the files of a plan hold, by the name of their table."""

    prompts: dict[str, list[str]]
    texts: dict[str, str]


def read_plan(path: Path) -> Plan:
    """The plan with all its tables; PlanError, naming table and key, for what no plan can say."""
    plan = read_table(Plan, raw := read_toml(path), str(path))
    check_name(plan.name, str(path))
    kinds = {"systems": System, "tasks": Task, "fidelity": Prompts, "perplexity": Text, "probabilities": Pair}
    plan = dataclasses.replace(plan, **{key: read_tables(kind, raw, key, path) for key, kind in kinds.items()})
    if not plan.systems:
        raise PlanError(f"{path}: no table [[systems]]")
    if not any(getattr(plan, part) for part in PARTS):
        raise PlanError(f"{path}: nothing to measure: add a table of {', '.join(f'[[{part}]]' for part in PARTS)}")
    _check_numbers(plan, path)
    _check_circle(plan, path)
    _check_tasks(plan, path)
    _check_pairs(plan, path)
    return plan


def _check_numbers(plan: Plan, path: Path) -> None:
    at_least_one = [(f"{path}: {key}", getattr(plan, key)) for key in ("batch_size", "max_new_tokens")]
    for data in plan.fidelity:
        at_least_one += [(f"{path}: [[fidelity]] {data.name!r}: batch_sizes", size) for size in data.batch_sizes]
    for text in plan.perplexity:
        where = f"{path}: [[perplexity]] {text.name!r}"
        at_least_one.append((f"{where}: stride", text.stride))
        at_least_one += [(f"{where}: lines", text.lines)] * (text.lines is not None)
        if text.max_length <= text.stride:
            raise PlanError(f"{where}: max_length is {text.max_length}, it must be more than stride, {text.stride}: "
                            "what a window begins with is the context of what it scores")
    for task in plan.tasks:
        where = f"{path}: [[tasks]] {task.task!r}"
        at_least_one += [(f"{where}: {key}", getattr(task, key)) for key in ("limit", "max_gen_toks")
                         if getattr(task, key) is not None]
        if task.num_fewshot is not None and task.num_fewshot < 0:
            raise PlanError(f"{where}: num_fewshot is {task.num_fewshot}, it must be at least 0")
    if plan.seed < 0:
        raise PlanError(f"{path}: seed is {plan.seed}, it must be at least 0")
    for where, value in at_least_one:
        if value < 1:
            raise PlanError(f"{where} is {value}, it must be at least 1")


def _check_circle(plan: Plan, path: Path) -> None:
    references = {system.name: system.reference for system in plan.systems}
    for name in references:
        way = [name]
        while (following := references.get(way[-1])) is not None and following not in way:
            way.append(following)
        if following == name:
            said = " -> ".join(map(repr, [*way, name]))
            raise PlanError(f"{path}: [[systems]] references go in a circle, {said}: leave one out")


def _check_tasks(plan: Plan, path: Path) -> None:
    names = [task.task for task in plan.tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlanError(f"{path}: {names.count(twice)} tables [[tasks]] have task {twice!r}: leave one")


def _check_pairs(plan: Plan, path: Path) -> None:
    systems = {system.name: system for system in plan.systems}
    for number, pair in enumerate(plan.probabilities, 1):
        where = f"{path}: [[probabilities]] {number}"
        for key in ("system", "reference"):
            found = systems.get(name := getattr(pair, key))
            if found is None:
                raise PlanError(f"{where}: {key} is {name!r}, the systems are {', '.join(map(repr, systems))}")
            if found.levels:
                raise PlanError(f"{where}: {key} {name!r} has levels, which change no probability: name its target")
        names = [data.name for data in plan.fidelity]
        if pair.data not in names:
            raise PlanError(f"{where}: data is {pair.data!r}, the tables [[fidelity]] are "
                            f"{', '.join(map(repr, names)) or 'none'}")


def check_plan(plan: Plan, places: Places, path: Path) -> Material:
    """What the plan's files hold; PlanError for folders and files that are not there or hold too little."""
    check_systems(plan.systems, places, path)
    prompts = {data.name: prompts_of(data, places, f"{path}: [[fidelity]] {data.name!r}") for data in plan.fidelity}
    return Material(prompts, {text.name: _read_text(text, places, path) for text in plan.perplexity})


def _read_text(asked: Text, places: Places, path: Path) -> str:
    where = f"{path}: [[perplexity]] {asked.name!r}"
    file = require_file(places.fill(asked.file), f"{where}: file")
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            lines = opened.readlines()
    except ValueError as error:
        raise PlanError(f"{where}: {file} is no text in UTF-8: {error}") from error
    text = "".join(lines[: asked.lines])
    if len(lines) < (asked.lines or 0) or not text.strip():
        raise PlanError(f"{where}: {file} holds {len(lines)} lines{'' if text.strip() else ' of nothing'}, lines is "
                        f"{asked.lines if asked.lines is not None else 'left out'}")
    return text
