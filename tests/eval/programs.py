"""How do tests start the programs of eval/, on a plan and prompts of theirs? With the fixture `from_the_root`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

needs_plans = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")


def program(name: str) -> ModuleType:
    """eval/<name>/__main__.py for a program; for "bench_gpu.chain" eval/bench_gpu/chain.py."""
    main = f"eval.{name}.__main__"
    return importlib.import_module(main if "." not in name else f"eval.{name}")


def system(name: str, **settings: object) -> str:
    """A table [[systems]] of a plan: its model is the one of `run_plan`, its other keys are the settings."""
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in {"model": "{models}", **settings}.items()]
    return f'[[systems]]\nname = "{name}"\n' + "".join(lines)


def words(count: int) -> str:
    """The table of a plan that asks for so many prompts of `write_words`."""
    return f'[[data]]\nname = "words"\nfile = "{{data}}/words.jsonl"\ncount = {count}\n'


def write_words(folder: Path, prompts: Iterable[dict]) -> None:
    (folder / "words.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")


def run_plan(name: str, folder: Path, model: Path, *options: str) -> tuple[int, list[dict]]:
    """Run eval.<name> on the plan and the prompts in `folder`: its exit status, and all lines of its results."""
    results = folder / "results"
    status = program(name).main([
        str(folder / "plan.toml"), "--models", str(model), "--data", str(folder), "--results", str(results), *options])
    files = sorted(results.glob("*.jsonl"))
    return status, [json.loads(line) for file in files for line in file.read_text().splitlines()]
