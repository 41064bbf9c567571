"""Which cells does a plan measure: which levels, on which prompts, how many rows, how many new tokens?"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path

from eval.plans.places import Places
from eval.plans.systems import Prompts, System, check_systems, prompts_of
from eval.plans.tables import PlanError, check_name, read_table, read_tables, read_toml

RANDOM = "random:"  # before the folder of a model: its shape and tokenizer, with random weights


@dataclass(frozen=True)
class Chain:
    """Levels as `generate` takes them; "random:FOLDER" is a model of FOLDER's shape with random weights."""

    name: str
    levels: list[str]

    @property
    def folders(self) -> list[str]:
        """The levels with the folders that random ones are made of, for checks."""
        return [level.removeprefix(RANDOM) for level in self.levels]


@dataclass(frozen=True)
class Data:
    """The first `count` prompts of a file that have at least so many characters."""

    name: str
    file: str
    count: int
    characters: int = 0


@dataclass(frozen=True)
class Cell:
    """One chain on `batch` rows of one data set.

    temperature: 0 is greedy. prompt: "short", a prompt of the data set as it is, or "long", several joined.
    """

    chain: str
    data: str
    batch: int = 1
    new_tokens: int = 256
    temperature: float = 0.0
    prompt: str = "short"

    @property
    def name(self) -> str:
        drawn = f"t{self.temperature:g}" if self.temperature else "greedy"
        return f"{self.chain}.{self.data}.b{self.batch}.n{self.new_tokens}.{drawn}.{self.prompt}"


@dataclass(frozen=True)
class Plan:
    """Every one of `cells`, `repeats` times.

    model, dtype, format: the target, quantized while it loads where `format` says so. lengths: of the drafts of fixed
    plans. short: tokens at which a short prompt is cut; long: tokens of a long one. seed: of the order of the prompts.
    """

    name: str
    model: str
    dtype: str = "bfloat16"
    format: str | None = None
    repeats: int = 5
    lengths: list[int] = field(default_factory=lambda: [2, 4, 8])
    short: int = 256
    long: int = 1500
    seed: int = 0
    chains: list = field(default_factory=list)
    data: list = field(default_factory=list)
    cells: list = field(default_factory=list)

    def chain(self, cell: Cell) -> Chain:
        """The levels of a cell."""
        return next(one for one in self.chains if one.name == cell.chain)

    def system(self, chain: Chain) -> System:
        """The target with these levels, as plans name it; random levels as the folders they are made of."""
        return System(chain.name, self.model, self.dtype, self.format, levels=chain.folders)


def read_plan(path: Path) -> Plan:
    """The plan; PlanError, naming table and key, for what no plan can say."""
    plan = read_table(Plan, raw := read_toml(path), str(path))
    check_name(plan.name, str(path))
    tables = {"chains": Chain, "data": Data, "cells": Cell}
    plan = dataclasses.replace(plan, **{key: read_tables(kind, raw, key, path) for key, kind in tables.items()})
    for key in (*tables, "lengths"):
        if not getattr(plan, key):
            raise PlanError(f"{path}: no {key}")
    for name, value in [("repeats", plan.repeats), ("short", plan.short), ("long", plan.long),
                        *(("lengths", one) for one in plan.lengths)]:
        if value < 1:
            raise PlanError(f"{path}: {name} holds {value}, it must be at least 1")
    for one in plan.chains:
        if not one.levels:
            raise PlanError(f"{path}: chain {one.name!r} has no levels; the target alone takes part in every cell")
    _check_cells(plan, path)
    return plan


def _check_cells(plan: Plan, path: Path) -> None:
    known = {"chain": [one.name for one in plan.chains], "data": [one.name for one in plan.data],
             "prompt": ["short", "long"]}
    for number, cell in enumerate(plan.cells, 1):
        where = f"{path}: cell {number}, {cell.name}"
        for key, values in known.items():
            if getattr(cell, key) not in values:
                raise PlanError(f"{where}: {key} is {getattr(cell, key)!r}, choose one of {', '.join(values)}")
        if min(cell.batch, cell.new_tokens) < 1 or cell.temperature < 0:
            raise PlanError(f"{where}: batch and new_tokens must be at least 1, temperature at least 0")


def check(plan: Plan, places: Places, path: Path) -> dict[str, list[str]]:
    """The prompts of each data set, in the plan's order; PlanError for folders and files that are not there."""
    check_systems([plan.system(chain) for chain in plan.chains], places, path)
    found = {}
    for data in plan.data:
        where = f"{path}: data {data.name!r}"
        prompts = prompts_of(Prompts(data.name, data.file, data.count), places, where)
        prompts = [prompt for prompt in prompts if len(prompt) >= data.characters]
        if not prompts:
            raise PlanError(f"{where}: none of its {data.count} prompts has {data.characters} characters")
        random.Random(plan.seed).shuffle(prompts)
        found[data.name] = prompts
    return found


def chosen(plan: Plan, only: str | None, shard: int, shards: int) -> list[Cell]:
    """The cells of a shard whose names hold `only`; PlanError where no cell of the plan does."""
    if only is not None and not any(only in cell.name for cell in plan.cells):
        raise PlanError(f"--only is {only!r}, which no cell holds; the first is {plan.cells[0].name}")
    return [cell for number, cell in enumerate(plan.cells)
            if number % shards == shard and (only is None or only in cell.name)]
