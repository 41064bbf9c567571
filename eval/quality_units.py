"""Into which results does a plan fall apart? A unit is one system measured on one thing: lines that appear at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.plan import Places
from eval.plan_systems import System
from eval.quality_plan import Material, Plan
from eval.results import Results

_PROBES, _PROBE_BYTES = 64, 1 << 14  # read of every file of weights: 1 MiB, evenly spread


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

    def __init__(self, plan: Plan, material: Material, places: Places) -> None:
        self.plan = plan
        folders = {system.model: Path(places.fill(system.model)) for system in plan.systems}
        self.weights = {model: fingerprint(folder) for model, folder in folders.items()}
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
        return {"system": system.asked, "weights": self.weights[system.model], "prompts": self.hashes[data],
                "max_new_tokens": self.plan.max_new_tokens}

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
            asked = {"system": system.asked, "weights": self.weights[system.model],
                     "text": self.text_hashes[text.name], "max_length": text.max_length, "stride": text.stride}
            yield Unit("perplexity", "perplexity", system, {"system": system.name, "data": text.name}, asked)

    def tasks(self, system: System) -> Iterator[Unit]:
        """One per task."""
        reference = None if system.reference is None else self.plan.system(system.reference).asked
        for task in self.plan.tasks:
            asked = {"system": system.asked, "weights": self.weights[system.model], "reference": reference,
                     "task": task.asked, "seed": self.plan.seed}
            yield Unit("tasks", "task", system, {"system": system.name, "task": task.task}, asked)

    def probabilities(self) -> Iterator[Unit]:
        """One per pair."""
        for pair in self.plan.probabilities:
            system, reference = self.plan.system(pair.system), self.plan.system(pair.reference)
            asked = {**self.decoding(reference, pair.data), "system": system.asked, "reference": reference.asked,
                     "system_weights": self.weights[system.model], "seed": self.plan.seed}
            identity = {"system": system.name, "reference": reference.name, "data": pair.data}
            yield Unit("probabilities", "probabilities", system, identity, asked)


def digest(value: Any) -> str:
    """A hash of something JSON can write."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def fingerprint(folder: Path) -> str | None:
    """A hash of a model's config and of samples of its weights, so that another model in its folder is noticed.

    No certificate: of each file of weights it reads its size and 1 MiB. None for a hub name.
    """
    if not folder.is_dir():
        return None
    state = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as weights:
            for number in range(_PROBES):
                weights.seek(number * size // _PROBES)
                state.update(weights.read(_PROBE_BYTES))
    return state.hexdigest()[:16]
