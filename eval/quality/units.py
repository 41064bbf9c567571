"""Into which results does a plan fall apart? A unit is one system measured on one thing: lines that appear at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.plans.identity import arithmetic, digest, fingerprint, level_weights
from eval.plans.places import Places
from eval.plans.systems import System
from eval.quality.plan import Material, Plan
from eval.records.writer import Results


@dataclass(frozen=True)
class Unit:
    """One system on one thing. identity: what finds its lines; asked: what their numbers depend on."""

    part: str
    kind: str
    system: System
    identity: dict[str, Any]
    asked: dict[str, Any]

    @property
    def title(self) -> str:
        """For a progress bar."""
        return " ".join(str(value) for value in self.identity.values())

    def line(self, results: Results) -> dict[str, Any] | None:
        """Its line, where it is finished (of a task: the first of its metrics)."""
        found = results.find(self.kind, self.asked, **self.identity)
        if found is None or self.kind != "task":
            return found
        whole = all(results.find("task", self.asked, **self.identity, metric=name) for name in found["metrics"])
        return found if whole else None


class Units:
    """All units of a plan, with what their numbers depend on."""

    def __init__(self, plan: Plan, material: Material, places: Places, device: str,
                 documents: dict[str, str]) -> None:
        """documents: a hash of what each task asks (eval.quality.tasks.documents), where tasks are among the parts."""
        self.plan, self.documents, self.arithmetic = plan, documents, arithmetic(device)
        folders = {system.model: Path(places.fill(system.model)) for system in plan.systems}
        self.weights = {model: fingerprint(folder) for model, folder in folders.items()}
        self.level_weights = {system.name: level_weights(system, places) for system in plan.systems}
        self.hashes = {data: digest(prompts) for data, prompts in material.prompts.items()}
        self.text_hashes = {text: digest(content) for text, content in material.texts.items()}

    def of_parts(self, parts: list[str]) -> list[Unit]:
        """The units of these parts, system by system, each after its reference; probabilities come last."""
        found: list[Unit] = []
        for system in self.plan.in_order:
            for part in ("fidelity", "perplexity", "tasks"):
                found += getattr(self, part)(system) if part in parts else []
        return found + (list(self.probabilities()) if "probabilities" in parts else [])

    def decoding(self, system: System, data: str) -> dict[str, Any]:
        """What a system's greedy continuations of this data depend on."""
        return {**self._system(system), "prompts": self.hashes[data], "max_new_tokens": self.plan.max_new_tokens}

    def _system(self, system: System) -> dict[str, Any]:
        """A system, the weights behind its names, those of its levels where these are folders, and what computes."""
        levels = {"level_weights": found} if (found := self.level_weights[system.name]) else {}
        return {"system": system.asked, "weights": self.weights[system.model], **levels,
                "arithmetic": self.arithmetic}

    def fidelity(self, system: System) -> Iterator[Unit]:
        """One per data file and batch size, of systems with a reference."""
        if system.reference is None:
            return
        reference = self.plan.system(system.reference)
        for data in self.plan.fidelity:
            asked = {**self.decoding(system, data.name), "reference": reference.asked, "seed": self.plan.seed,
                     "reference_weights": self.weights[reference.model]}
            for size in self.plan.sizes(data):
                identity = {"system": system.name, "reference": reference.name, "data": data.name, "batch": size}
                yield Unit("fidelity", "fidelity", system, identity, asked)

    def perplexity(self, system: System) -> Iterator[Unit]:
        """One per text, of systems without levels."""
        for text in self.plan.perplexity if not system.levels else ():
            asked = {**self._system(system), "text": self.text_hashes[text.name], "max_length": text.max_length,
                     "stride": text.stride}
            yield Unit("perplexity", "perplexity", system, {"system": system.name, "data": text.name}, asked)

    def tasks(self, system: System) -> Iterator[Unit]:
        """One per task."""
        other = None if system.reference is None else self.plan.system(system.reference)
        reference = {"reference": other and other.asked}
        reference |= {"reference_weights": self.weights[other.model]} if other else {}
        for task in self.plan.tasks:
            asked = {**self._system(system), **reference, "task": task.asked, "seed": self.plan.seed,
                     "documents": self.documents[task.task]}
            yield Unit("tasks", "task", system, {"system": system.name, "task": task.task}, asked)

    def probabilities(self) -> Iterator[Unit]:
        """One per pair."""
        for pair in self.plan.probabilities:
            system, reference = self.plan.system(pair.system), self.plan.system(pair.reference)
            asked = {**self.decoding(reference, pair.data), "system": system.asked, "reference": reference.asked,
                     "system_weights": self.weights[system.model], "seed": self.plan.seed}
            identity = {"system": system.name, "reference": reference.name, "data": pair.data}
            yield Unit("probabilities", "probabilities", system, identity, asked)
