"""In which files are the finished items of a plan kept, and does every one have its own?

Names, which may hold hyphens, are joined by hyphens: "a-b" with "c" and "a" with "b-c" would share a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eval.plans.systems import Prompts, System
from eval.plans.tables import PlanError
from eval.quality.plan import Plan, Task, Text


def ids(system: System, data: Prompts, size: int) -> str:
    """Of greedy continuations."""
    return f"ids-{system.name}-{data.name}-{size}"


def windows(system: System, text: Text) -> str:
    """Of the windows of a text."""
    return f"windows-{system.name}-{text.name}"


def logprobs(system: System, reference: System, data: Prompts) -> str:
    """Of the reference's tokens under the system."""
    return f"logprobs-{system.name}-{reference.name}-{data.name}"


def requests(system: System, task: Task) -> str:
    """Of what lm-eval asked."""
    return f"requests-{system.name}-{task.task}"


def answers(system: System, task: Task) -> str:
    """Of the items of a task."""
    return f"answers-{system.name}-{task.task}"


def check(plan: Plan, path: Path) -> None:
    """PlanError where two things would be kept in one file, on file systems without upper case, too."""
    owners: dict[str, str] = {}
    for name, owner in _all(plan):
        other = owners.setdefault(name.lower(), owner)
        if other != owner:
            raise PlanError(f"{path}: {other} and {owner} would both be kept in {name}.jsonl: rename one")


def _all(plan: Plan) -> Iterator[tuple[str, str]]:
    """(file, whose it is)"""
    for system in plan.systems:
        for data in plan.fidelity:
            for size in plan.sizes(data):
                yield ids(system, data, size), f"{system.name!r} on {data.name!r} at batch size {size}"
        for text in plan.perplexity:
            yield windows(system, text), f"{system.name!r} on {text.name!r}"
        for task in plan.tasks:
            yield answers(system, task), f"{system.name!r} on {task.task!r}"
    for pair in plan.probabilities:
        reference, data = plan.system(pair.reference), plan.data(pair.data)
        for system in (reference, plan.system(pair.system)):
            yield logprobs(system, reference, data), f"{system.name!r} after {reference.name!r} on {data.name!r}"
