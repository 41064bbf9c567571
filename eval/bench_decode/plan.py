"""What does a throughput plan ask for: which target, which chains over it, on which batches, how often?"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.plans.places import Places
from eval.plans.systems import Prompts, System, check_systems, prompts_of
from eval.plans.tables import PlanError, check_name, read_table, read_tables, read_toml

STOCK, ASSISTED, ALONE = "stock greedy", "stock assisted", "target alone"
NESTED_ALONE = "nested target alone"
EXACT_FORMATS = (None, "nested-bf16")  # of one target: their ids are the same, so that their speeds can be compared


@dataclass(frozen=True)
class Ablation:
    """One system with other draft lengths of one of its levels (1: the level that the target checks), at one batch
    size, on every data file."""

    system: str
    num_draft_tokens: list[int]
    level: int = 1
    batch: int = 1


@dataclass(frozen=True)
class Plan:
    """Every [[systems]] on every [[data]], greedily, in `batches` batches of each size, `repeats` times.

    systems: chains over one and the same target, plain or nested (format = "nested-bf16": the same ids); the target
    alone and stock transformers take part by themselves. over: names of systems that others are compared with, too.
    seed: of the order of the prompts, which decides what shares a batch.
    memory: also weights, keys and values and peaks, a fresh process each.
    """

    name: str
    max_new_tokens: int = 128
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    batches: int = 4
    repeats: int = 3
    seed: int = 0
    memory: bool = True
    over: list[str] = field(default_factory=list)
    systems: list = field(default_factory=list)
    data: list = field(default_factory=list)
    ablation: list = field(default_factory=list)


@dataclass(frozen=True)
class Contender:
    """A way to decode a batch: transformers' own, assisted (one row only), the target alone, or a chain over it.

    ablation: it takes part for its draft length only, at batch size `only`.
    """

    name: str
    system: System
    way: str = "chain"
    only: int | None = None
    ablation: str | None = None

    def takes_part(self, size: int) -> bool:
        """Whether it decodes batches of this size."""
        return self.only in (None, size)


@dataclass(frozen=True)
class Unit:
    """One batch, which every contender decodes in turn: what is finished or not, as a whole."""

    data: str
    size: int
    batch: int
    repeat: int

    @property
    def key(self) -> str:
        return f"{self.data}, batch size {self.size}, batch {self.batch}, repeat {self.repeat}"


def read_plan(path: Path) -> Plan:
    """The plan; PlanError, naming table and key, for what no plan can say."""
    plan = read_table(Plan, raw := read_toml(path), str(path))
    check_name(plan.name, str(path))
    tables = {"systems": System, "data": Prompts, "ablation": Ablation}
    plan = dataclasses.replace(plan, **{key: read_tables(kind, raw, key, path) for key, kind in tables.items()})
    for key in ("systems", "data", "batch_sizes"):
        if not getattr(plan, key):
            raise PlanError(f"{path}: no {key}" if key == "batch_sizes" else f"{path}: no table [[{key}]]")
    numbers = [(name, getattr(plan, name)) for name in ("max_new_tokens", "batches", "repeats")]
    sizes = [("batch_sizes", size) for size in plan.batch_sizes]
    sizes += [(f"[[data]] {one.name!r}: batch_sizes", size) for one in plan.data for size in one.batch_sizes]
    for where, value in numbers + sizes:
        if value < 1:
            raise PlanError(f"{path}: {where} holds {value}, it must be at least 1")
    if plan.seed < 0:
        raise PlanError(f"{path}: seed is {plan.seed}, it must be at least 0")
    _check_systems(plan, path)
    _check_ablation(plan, path)
    return plan


def _check_systems(plan: Plan, path: Path) -> None:
    first = plan.systems[0]
    if first.format is not None and any(system.format is None for system in plan.systems):
        raise PlanError(f"{path}: [[systems]] {first.name!r} comes first and has a format: begin with a system of the "
                        "plain target, which is the one that takes part alone")
    for system in plan.systems:
        where = f"{path}: [[systems]] {system.name!r}"
        if not system.levels:
            raise PlanError(f"{where}: no levels; the target alone takes part without being asked for")
        if system.name in (STOCK, ASSISTED, ALONE, NESTED_ALONE):
            raise PlanError(f"{where}: this name is taken by a contender that always takes part")
        for key in {*system.target, *first.target}:
            mine, its = getattr(system, key), getattr(first, key)
            if mine != its and not (key == "format" and {mine, its} <= {*EXACT_FORMATS}):
                raise PlanError(f"{where}: {key} is {mine!r}, that of {first.name!r} is {its!r}: speeds are compared "
                                "over one target, make two plans")
    unknown = [name for name in plan.over if name not in [system.name for system in plan.systems]]
    if unknown:
        raise PlanError(f"{path}: over holds {unknown[0]!r}, the plan has {', '.join(s.name for s in plan.systems)}")


def _check_ablation(plan: Plan, path: Path) -> None:
    by_name = {system.name: system for system in plan.systems}
    for number, one in enumerate(plan.ablation, 1):
        where = f"{path}: [[ablation]] {number}"
        if one.system not in by_name:
            raise PlanError(f"{where}: system is {one.system!r}, the plan has {', '.join(by_name)}")
        depth = len(by_name[one.system].levels)
        if not 1 <= one.level <= depth:
            raise PlanError(f"{where}: level is {one.level}, {one.system!r} has {depth}, counted from 1")
        if by_name[one.system].num_draft_tokens is None and depth > 1:
            raise PlanError(f"{where}: {one.system!r} says no num_draft_tokens for the levels that do not vary")
        if not one.num_draft_tokens or min(one.num_draft_tokens) < 1 or len(set(one.num_draft_tokens)) < 2:
            raise PlanError(f"{where}: num_draft_tokens is {one.num_draft_tokens}, two or more different lengths of "
                            "at least 1 make a curve")
        if not any(one.batch in sizes_of(plan, data) for data in plan.data):
            raise PlanError(f"{where}: batch is {one.batch}, which no data is decoded with")


def check(plan: Plan, places: Places, path: Path) -> dict[str, list[str]]:
    """The prompts of each data file, in the plan's order; PlanError for folders and files that are not there, and
    for batch sizes that the prompts do not fill."""
    check_systems(plan.systems, places, path)
    found = {}
    for data in plan.data:
        where = f"{path}: [[data]] {data.name!r}"
        prompts = prompts_of(data, places, where)
        random.Random(plan.seed).shuffle(prompts)
        if len(prompts) < max(sizes_of(plan, data)):
            raise PlanError(f"{where}: count is {data.count}, which does not fill a batch of "
                            f"{max(sizes_of(plan, data))}")
        found[data.name] = prompts
    return found


def sizes_of(plan: Plan, data: Prompts) -> list[int]:
    """The batch sizes a data file is decoded with: its own, else the plan's."""
    return data.batch_sizes or plan.batch_sizes


def units(plan: Plan) -> Iterator[Unit]:
    """Small batches first; all batches of a size, then all of them again."""
    for data in plan.data:
        for size in sorted(set(sizes_of(plan, data))):
            whole = min(plan.batches, data.count // size)
            for repeat in range(plan.repeats):
                for batch in range(whole):
                    yield Unit(data.name, size, batch, repeat)


def contenders(plan: Plan) -> list[Contender]:
    """Stock, assisted where a level is a model's folder, the target alone (and nested, where the plan has both), the
    plan's systems, its ablations."""
    alone = _alone(plan.systems[0], ALONE)
    found = [Contender(STOCK, alone, "stock")]
    helper = next(((system, at) for system in plan.systems for at, level in enumerate(system.levels)
                   if "/" in level and not level.endswith("@mxfp4")), None)
    if helper is not None and alone.format is None:
        system, at = helper
        found.append(Contender(ASSISTED, _only_level(system, at), "assisted", only=1))
    found.append(Contender(ALONE, alone, "alone"))
    other = next((system for system in plan.systems if system.format != alone.format), None)
    if other is not None:
        found.append(Contender(NESTED_ALONE, _alone(other, NESTED_ALONE), "alone"))
    found += [Contender(system.name, system) for system in plan.systems]
    by_name = {system.name: system for system in plan.systems}
    for one in plan.ablation:
        varied = [_of_length(by_name[one.system], one, length) for length in one.num_draft_tokens]
        found += [each for each in varied if each not in found]  # curves over two levels cross at one point
    return found


def _alone(system: System, name: str) -> System:
    return dataclasses.replace(system, name=name, levels=[], num_draft_tokens=None, confidence_threshold=None,
                               reference=None)


def per_level(value: Any, at: int) -> Any:
    """What a per-level option says of one level."""
    return value[at] if isinstance(value, list) else value


def _only_level(system: System, at: int) -> System:
    return dataclasses.replace(system, name=ASSISTED, levels=[system.levels[at]],
                               num_draft_tokens=per_level(system.num_draft_tokens, at),
                               confidence_threshold=per_level(system.confidence_threshold, at))


def _of_length(system: System, ablation: Ablation, length: int) -> Contender:
    lengths = [per_level(system.num_draft_tokens, at) for at in range(len(system.levels))]
    lengths[ablation.level - 1] = length
    name = f"{system.name}, K {', '.join(map(str, lengths))}, batch size {ablation.batch}"
    varied = dataclasses.replace(system, name=system.name, num_draft_tokens=lengths)
    return Contender(name, varied, only=ablation.batch, ablation=system.name)
