"""Which cells does a plan measure: which levels, on which prompts, how many rows, how many new tokens?"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path

from eval.bench_auto.shapes import SHAPE, Shape, draft_shape, random_prompts, target_shape
from eval.plans.places import Places
from eval.plans.systems import DTYPES, Prompts, System, check_systems, prompts_of
from eval.plans.tables import PlanError, check_name, read_table, read_tables, read_toml

RANDOM = "random:"  # before the folder of a model: its shape and tokenizer, with random weights


@dataclass(frozen=True)
class Chain:
    """Levels as `generate` takes them; "random:FOLDER" is a model of FOLDER's shape with random weights, and
    "shape:NAME?acceptance=0.8" a draft of a target that is a shape."""

    name: str
    levels: list[str]

    @property
    def folders(self) -> list[str]:
        """The levels with the folders that random ones are made of, for checks."""
        return [level.removeprefix(RANDOM) for level in self.levels]


@dataclass(frozen=True)
class Data:
    """The first `count` prompts of a file that have at least so many characters; for a target that is a shape, `count`
    prompts of `tokens` random ids."""

    name: str
    count: int
    file: str | None = None
    characters: int = 0
    tokens: int | None = None


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

    model, dtype, format: the target, quantized while it loads where `format` says so, or "shape:NAME", made without a
    checkpoint. lengths: of the drafts of fixed plans. short: tokens at which a short prompt is cut; long: tokens of a
    long one. seed: of the order of the prompts, and of shapes. stock: whether transformers' own assisted generation
    takes part, for one row.
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
    stock: bool = True
    chains: list = field(default_factory=list)
    data: list = field(default_factory=list)
    cells: list = field(default_factory=list)

    @property
    def is_shape(self) -> bool:
        """Whether the target is made, not loaded."""
        return self.model.startswith(SHAPE)

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
    shape = check_shapes(plan, path)
    if shape is None:
        check_systems([plan.system(chain) for chain in plan.chains], places, path)
    return {data.name: _drawn(plan, data, shape, f"{path}: data {data.name!r}") if shape is not None
            else _read(plan, data, places, f"{path}: data {data.name!r}") for data in plan.data}


def check_shapes(plan: Plan, path: Path) -> Shape | None:
    """The shape of the target, None where it is a folder; PlanError for a shape and levels that do not go together."""
    levels = [(f"{path}: chain {chain.name!r}", level) for chain in plan.chains for level in chain.levels]
    if not plan.is_shape:
        for where, level in levels:
            if level.startswith(SHAPE):
                raise PlanError(f"{where}: {level!r} drafts for a target that is a shape, and model is {plan.model!r}")
        return None
    found = target_shape(plan.model, f"{path}: model")
    if plan.dtype not in DTYPES:
        raise PlanError(f"{path}: dtype is {plan.dtype!r}, choose one of {', '.join(DTYPES)}")
    if plan.format is not None:
        raise PlanError(f"{path}: format is {plan.format!r}, but a shape is not quantized: leave it out")
    for where, level in levels:
        if level.startswith(SHAPE):
            draft_shape(level, where)
        elif "/" in level or level.startswith(RANDOM):
            raise PlanError(f"{where}: {level!r} has a tokenizer, and a target that is a shape has none: its levels "
                            f"are words and shapes")
    return found


def _drawn(plan: Plan, data: Data, shape: Shape, where: str) -> list[str]:
    """Random ids, as numbers."""
    if data.tokens is None or data.file is not None or data.characters:
        raise PlanError(f"{where}: a target that is a shape has no tokenizer: give tokens, the length of prompts of "
                        "random ids, and neither file nor characters")
    if min(data.count, data.tokens) < 1:
        raise PlanError(f"{where}: count and tokens must be at least 1")
    return random_prompts(shape, data.count, data.tokens, plan.seed)


def _read(plan: Plan, data: Data, places: Places, where: str) -> list[str]:
    """The prompts of a file, in the plan's order."""
    if data.file is None or data.tokens is not None:
        raise PlanError(f"{where}: it must have file, and tokens goes with a target that is a shape only")
    prompts = prompts_of(Prompts(data.name, data.file, data.count), places, where)
    prompts = [prompt for prompt in prompts if len(prompt) >= data.characters]
    if not prompts:
        raise PlanError(f"{where}: none of its {data.count} prompts has {data.characters} characters")
    random.Random(plan.seed).shuffle(prompts)
    return prompts


def chosen(plan: Plan, only: list[str], shard: int, shards: int) -> list[Cell]:
    """The cells of a shard whose names hold one of these texts, all without any; PlanError for one that no cell of the
    plan holds."""
    for text in only:
        if not any(text in cell.name for cell in plan.cells):
            raise PlanError(f"--only is {text!r}, which no cell holds; the first is {plan.cells[0].name}")
    return [cell for number, cell in enumerate(plan.cells)
            if number % shards == shard and (not only or any(text in cell.name for text in only))]
