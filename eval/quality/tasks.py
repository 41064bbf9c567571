"""What do a plan's systems score on lm-eval's tasks, and does a chain answer every item as its target alone does?

The only module of the program that needs lm-eval, which is imported when the first task is looked at.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.plans.fidelity import first_difference
from eval.plans.identity import digest
from eval.plans.models import Loaded
from eval.plans.systems import System
from eval.plans.tables import PlanError
from eval.quality.plan import Task
from hf_mlspec.evaluation import Journal

BOOTSTRAP = 1000  # resamples of metrics without a closed form of their error
_OURS = "mlspec_"  # tasks that come with the package; others are looked for in lm-eval's own
Answers = list[Any]  # of one item, a list of ids or a score per request


def documents(asked: Sequence[Task], data: Path) -> dict[str, str]:
    """By task, a hash of what its files hold and how it asks; PlanError for a task that lm-eval does not know, or
    whose files are not there.

    In the hash: the documents that are asked, those that examples are taken from where there are any, and the requests
    of the first one, which tell of the task's templates. No model is needed.
    """
    hashes = {}
    for task in asked:
        found = _read(task, data)
        if getattr(found, "UNSAFE_CODE", False):
            raise PlanError(f"[[tasks]] {task.task!r} runs generated programs as they are; mlspec_humaneval and "
                            "mlspec_mbpp run them confined")
        try:
            with _quiet():
                found.set_fewshot_seed(seed=0)
                found.build_all_requests(limit=1, rank=0, world_size=1)  # reads the examples, which may not be there
                shots = list(found.fewshot_docs()) if found.get_config("num_fewshot") else []
                holds = [list(islice(found.eval_docs, task.limit)), shots, [one.args for one in found.instances]]
        except Exception as error:  # whatever a task's own functions raise
            shots = found.get_config("num_fewshot")
            raise PlanError(f"[[tasks]] {task.task!r} with num_fewshot {shots}: {_first_line(error)}") from error
        hashes[task.task] = digest(json.dumps(holds, default=str))  # str: of dates and the like in other tasks
    return hashes


def evaluate(task: Task, system: System, loaded: Loaded, data: Path, *, batch_size: int, seed: int,
             journal: Path) -> tuple[list[dict[str, Any]], dict[str, Answers]]:
    """Run one task on one system; -> its metrics (metric, value, stderr) and the answers of every item.

    journal: a file that MLSpecLM keeps every finished request in, and does not compute those again.
    """
    import lm_eval

    from hf_mlspec.evaluation import MLSpecLM

    try:
        lm = MLSpecLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, levels=loaded.levels,
                      batch_size=batch_size, precision=system.precision, journal=str(journal), **system.speculation)
    except ValueError as error:  # a journal of other versions or weights
        raise PlanError(f"[[tasks]] {task.task!r}, {system.name!r}: {error}") from error
    asked = _read(task, data)
    if task.max_gen_toks is not None and asked.OUTPUT_TYPE == "generate_until":
        asked.set_config(key="generation_kwargs", value={"max_gen_toks": task.max_gen_toks}, update=True)
    asked.set_fewshot_seed(seed=seed)
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):  # metrics may draw
        set_seed(seed)
    with _quiet():
        # Not simple_evaluate: it would describe the machine after every task, with pip and compilers, for seconds.
        found = lm_eval.evaluate(lm=lm, task_dict={"tasks": {task.task: asked}}, limit=task.limit,
                                 bootstrap_iters=BOOTSTRAP, log_samples=True)
    samples = found["samples"][task.task]
    first = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    return _metrics(found["results"][task.task]), {str(one["doc_id"]): _answers(one, lm) for one in first}


def compared(expected: Journal, got: Journal) -> dict[str, Any]:
    """How many items have the same answers, and of every other one the first token (or score) that differs."""
    places = {item: _difference(expected[item], answers) for item, answers in got.items.items()}
    return {"identical_items": sum(place is None for place in places.values()),
            "differences": [{"item": item, **place} for item, place in places.items() if place is not None]}


def _difference(expected: Answers, got: Answers) -> dict[str, int] | None:
    for request, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one != other:
            ids = isinstance(one, list)
            return {"request": request, "position": first_difference(one, other) if ids else 0}
    return None


def _answers(sample: dict[str, Any], lm: Any) -> Answers:
    """Of an item: the ids written for each of its requests, or the log-probability of each continuation."""
    from hf_mlspec.evaluation import request_key

    found = []
    for arguments, responses in zip(sample["arguments"], sample["resps"], strict=True):
        if isinstance(responses[0], str):
            found.append(lm.generations[request_key("generate_until", tuple(arguments))]["ids"])
        else:
            score = responses[0]
            found.append(float(score[0] if isinstance(score, (list, tuple)) else score))
    return found


def _metrics(results: dict[str, Any]) -> list[dict[str, Any]]:
    """lm-eval's `{"exact_match,strict": 0.1, "exact_match_stderr,strict": 0.03}` as one entry per metric."""
    found = []
    for key, value in results.items():
        name, _, rule = key.partition(",")
        if not rule or name.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = results.get(f"{name}_stderr,{rule}")
        found.append({"metric": name if rule == "none" else f"{name} ({rule})", "value": float(value),
                      "stderr": float(error) if isinstance(error, (int, float)) else None})
    return found


def _read(task: Task, data: Path) -> Any:
    """The task, with the plan's number of examples, which lm-eval, given it, would drop where the task's own is 0."""
    try:
        with _quiet():
            manager = _tasks_known(str(data.resolve()), not task.task.startswith(_OURS))
            (found,) = manager.load([task.task])["tasks"].values()
    except Exception as error:  # whatever the loaders of lm-eval, datasets and YAML raise
        raise PlanError(f"[[tasks]] {task.task!r} cannot be read: {_first_line(error)}") from error
    own = found.get_config("num_fewshot")
    found.set_config(key="num_fewshot", value=(own or 0) if task.num_fewshot is None else task.num_fewshot)
    return found


@lru_cache
def _tasks_known(data: str, of_lm_eval: bool) -> Any:
    """Ours, and where they are asked for lm-eval's own: thousands of files, all of which are read for their names."""
    from lm_eval.tasks import TaskManager

    from hf_mlspec.evaluation import TASKS

    return TaskManager(include_path=str(TASKS), include_defaults=of_lm_eval, metadata={"data": data})


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval tells every setting as a warning; errors are still said."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

