"""How is what a plan asks for computed, item by item, so that a killed run goes on where it was?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval.plans import fidelity
from eval.plans.identity import arithmetic
from eval.plans.models import Models, check_levels, check_vocabularies
from eval.plans.systems import Prompts, System
from eval.plans.tables import PlanError
from eval.quality import journals, scores, tasks
from eval.quality.plan import Material, Plan, Task
from eval.quality.units import Unit, Units
from eval.records.progress import Bars, tell
from eval.records.writer import OTHER_RESULTS, Results
from hf_mlspec.evaluation import Journal


class Run:
    """The units of a plan under way. Journals of single items lie in `folder`, finished units in `results`."""

    def __init__(self, plan: Plan, units: Units, material: Material, models: Models, results: Results,
                 folder: Path) -> None:
        self.plan, self.units, self.material, self.models = plan, units, material, models
        self.results, self.folder = results, folder

    def run(self, todo: list[Unit], path: Path) -> None:
        """Check all of what is left, then compute it; PlanError with the plan's path before anything is computed."""
        left = [unit for unit in todo if unit.line(self.results) is None]
        try:
            self._check(left)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        compute = {"fidelity": self._fidelity, "perplexity": self._perplexity, "tasks": self._task,
                   "probabilities": self._probabilities}
        for count, unit in enumerate(left, 1):
            compute[unit.part](unit)
            tell(f"{unit.part} of {unit.system.name}: {count} of {len(left)} results")

    def _check(self, left: list[Unit]) -> None:
        """What can be known only with a model."""
        compared = dict.fromkeys((unit.system.name, name) for unit in left for name in self._references(unit))
        for name, reference in compared:
            check_vocabularies(self.plan.system(name), self.plan.system(reference), self.models.places)
        for system in self.plan.in_order:
            mine = [unit for unit in left if system in self._taking_part(unit)]
            if not mine:
                continue
            loaded = self.models.load(system)
            check_levels(system, loaded)
            for data in {unit.identity["data"] for unit in mine if unit.part in ("fidelity", "probabilities")}:
                fidelity.check_lengths(system, loaded, self.material.prompts[data], self.plan.max_new_tokens, data)
            for text in self.plan.perplexity:
                if any(unit.part == "perplexity" and unit.identity["data"] == text.name for unit in mine):
                    scores.text_windows(system, loaded, text, self.material.texts[text.name])

    @staticmethod
    def _references(unit: Unit) -> list[str]:
        """The system whose ids the unit's are held against, or which writes what it scores; texts are nobody's ids."""
        reference = unit.system.reference if unit.part == "tasks" else unit.identity.get("reference")
        return [] if reference is None else [reference]

    def _taking_part(self, unit: Unit) -> list[System]:
        reference = unit.identity.get("reference")
        return [unit.system] if reference is None else [unit.system, self.plan.system(reference)]

    def _fidelity(self, unit: Unit) -> None:
        data = self.plan.data(unit.identity["data"])
        expected = self._continuations(self.plan.system(unit.identity["reference"]), data, self.plan.sizes(data)[0])
        got = self._continuations(unit.system, data, unit.identity["batch"])
        found = fidelity.compared([entry["ids"] for entry in expected], [entry["ids"] for entry in got],
                                  self.plan.seed)
        self._add(unit, {**found, "max_new_tokens": self.plan.max_new_tokens,
                         "seconds": sum(entry["seconds"] for entry in got)})

    def _continuations(self, system: System, data: Prompts, size: int) -> list[dict[str, Any]]:
        prompts = self.material.prompts[data.name]
        asked = {**self.units.decoding(system, data.name), "batch": size}
        with self._items(journals.ids(system, data, size), asked, len(prompts)) as (journal, done):
            if len(journal) < len(prompts):
                fidelity.decode(system, self.models.load(system), prompts, max_new_tokens=self.plan.max_new_tokens,
                                batch_size=size, journal=journal, done=done)
            return [journal[str(number)] for number in range(len(prompts))]

    def _perplexity(self, unit: Unit) -> None:
        asked = next(text for text in self.plan.perplexity if text.name == unit.identity["data"])
        loaded, text = self.models.load(unit.system), self.material.texts[asked.name]
        rows = scores.text_windows(unit.system, loaded, asked, text)
        with self._items(journals.windows(unit.system, asked), unit.asked, len(rows)) as (journal, done):
            found = scores.scored(loaded, rows, batch_size=self.plan.batch_size, journal=journal, done=done,
                                  keep=lambda logprobs: -float(logprobs.double().sum()))
        self._add(unit, scores.perplexity(found, sum(row.scored for row in rows), text))

    def _probabilities(self, unit: Unit) -> None:
        pair = unit.identity
        data, reference = self.plan.data(pair["data"]), self.plan.system(pair["reference"])
        ids = [entry["ids"] for entry in self._continuations(reference, data, self.plan.sizes(data)[0])]
        found = [self._logprobs(system, reference, data, ids) for system in (reference, unit.system)]
        self._add(unit, scores.agreement(*found, seed=self.plan.seed))

    def _logprobs(self, system: System, reference: System, data: Prompts, ids: list[list[int]]) -> list[float]:
        """Of every token of the reference's continuations, in their order, under this system."""
        name = journals.logprobs(system, reference, data)
        asked = {**self.units.decoding(system, data.name), "continued_by": reference.asked,
                 "continued_by_weights": self.units.weights[reference.model]}
        with self._items(name, asked, len(ids)) as (journal, done):
            if len(journal) < len(ids):
                loaded = self.models.load(system)
                prompts = [loaded.encode(prompt) for prompt in self.material.prompts[data.name]]
                rows = [scores.Window([*prompt, *new], len(new)) for prompt, new in zip(prompts, ids, strict=True)]
                scores.scored(loaded, rows, batch_size=self.plan.batch_size, journal=journal, done=done,
                              keep=lambda logprobs: logprobs.tolist())
            return [value for number in range(len(ids)) for value in journal[str(number)]]

    def _task(self, unit: Unit) -> None:
        task = next(task for task in self.plan.tasks if task.task == unit.identity["task"])
        requests = self.folder / f"{journals.requests(unit.system, task)}.jsonl"
        resumed, begin = requests.exists(), time.perf_counter()
        with self._journal(journals.answers(unit.system, task), unit.asked) as journal:
            metrics, answers = tasks.evaluate(
                task, unit.system, self.models.load(unit.system), self.models.places.data, seed=self.plan.seed,
                batch_size=self.plan.batch_size, journal=requests)
            seconds = None if resumed else time.perf_counter() - begin  # of a part of the items it would say nothing
            for item, found in answers.items():
                if item not in journal:
                    journal.add(item, found)
                elif journal[item] != found:
                    raise PlanError(f"{journal.path} holds another answer to item {item}: the data of {task.task} are "
                                    "others now; remove the files and lines of this task and run again")
            compared = self._compared_task(unit, task, journal)
        names = [metric["metric"] for metric in metrics]
        for metric in metrics:
            if self.results.find("task", unit.asked, **unit.identity, metric=metric["metric"]) is None:
                self._add(unit, {**metric, "metrics": names, "items": len(answers), "seconds": seconds, **compared})

    def _compared_task(self, unit: Unit, task: Task, journal: Journal) -> dict[str, Any]:
        """With the answers of the reference, which came before."""
        if unit.system.reference is None:
            return {"identical_items": None, "differences": []}
        reference = self.plan.system(unit.system.reference)
        asked = next(one.asked for one in self.units.tasks(reference) if one.identity["task"] == task.task)
        with self._journal(journals.answers(reference, task), asked) as expected:
            if set(expected.items) != set(journal.items):
                raise PlanError(f"{expected.path} holds {len(expected)} answers, {journal.path} {len(journal)}, and "
                                f"not of the same items: remove the files and lines of task {task.task} and run again")
            return tasks.compared(expected, journal)

    def _add(self, unit: Unit, values: dict[str, Any]) -> None:
        self.results.add(unit.kind, {**unit.identity, **values}, asked=unit.asked)

    def _journal(self, name: str, asked: dict[str, Any]) -> Journal:
        try:
            return Journal(self.folder / f"{name}.jsonl", {**asked, "arithmetic": arithmetic(self.models.device)},
                           elsewhere=OTHER_RESULTS)
        except ValueError as error:
            raise PlanError(str(error)) from error

    @contextmanager
    def _items(self, name: str, asked: dict[str, Any], total: int) -> Iterator[tuple[Journal, Callable[[], None]]]:
        """A journal of single items, with a progress bar where some are left."""
        with self._journal(name, asked) as journal:
            if len(journal) == total:
                yield journal, lambda: None
                return
            with Bars() as progress:
                bar = progress.add_task(name, total=total, completed=len(journal))
                yield journal, lambda: progress.advance(bar)
