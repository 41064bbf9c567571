"""How is a system of a plan loaded, and does everything the plan asks of it fit? One target in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

import hf_mlspec
from eval.plans.places import Places
from eval.plans.systems import System
from eval.plans.tables import PlanError


@dataclass(frozen=True)
class Loaded:
    """A target, set to its system's precision, with its tokenizer; levels with the places filled in."""

    model: transformers.PreTrainedModel
    tokenizer: Any
    levels: list[str]

    @property
    def positions(self) -> int | None:
        """Tokens the target has positions for, None where its config sets no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, special tokens as the tokenizer adds them."""
        return self.tokenizer(text, verbose=False)["input_ids"]


class Models:
    """Loads systems; the target stays in memory until a system with another one is asked for."""

    def __init__(self, places: Places, device: str) -> None:
        self.places, self.device = places, device
        self._key: dict[str, Any] | None = None
        self._model: transformers.PreTrainedModel | None = None
        self._tokenizer: Any = None
        self._bits: int | None = None  # activation bits the target was loaded with

    def load(self, system: System) -> Loaded:
        """The system, ready to decode; PlanError where there is none in its folder, or not at its precision."""
        key = {name: value for name, value in system.target.items() if name != "precision"}
        if key != self._key:
            self._key = self._model = None  # the other target goes before this one comes
            self._read(system)
            self._key = key
        hf_mlspec.clear(self._model)
        self._set_precision(system)
        return Loaded(self._model, self._tokenizer, [self.places.fill(level) for level in system.levels])

    def _read(self, system: System) -> None:
        how = {} if system.format is None else {
            "quantization_config": hf_mlspec.MLSpecConfig(format=system.format, **system.packing)
        }
        folder = self.places.fill(system.model)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, system.dtype), **how)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise PlanError(f"[[systems]] {system.name!r}: {folder} cannot be loaded: {error}") from error
        self._model = model.to(self.device).eval()
        self._bits = hf_mlspec.precision_switch(model).default_bits if _is_packed(model) else None

    def _set_precision(self, system: System) -> None:
        if self._bits is None and system.precision is None:
            return
        try:
            switch = hf_mlspec.precision_switch(self._model)
            switch.bits = self._bits if system.precision is None else switch.bits_of(system.precision)
        except ValueError as error:
            raise PlanError(f"[[systems]] {system.name!r}: precision {system.precision!r}: {error}") from error


def check_levels(system: System, loaded: Loaded) -> None:
    """PlanError for levels that cannot draft for this target: they are built, and nothing is decoded."""
    try:
        hf_mlspec.generate_stream(loaded.model, [], assistant_models=loaded.levels, tokenizer=loaded.tokenizer,
                                  speculation_config=system.speculation).close()
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(f"[[systems]] {system.name!r}: levels {system.levels}: {error}") from error


def check_vocabularies(system: System, reference: System, places: Places) -> None:
    """PlanError where the ids of two systems do not stand for the same text: nothing is loaded but tokenizers."""
    if system.model == reference.model:
        return
    mine, its = (_vocabulary(one, places) for one in (system, reference))
    if mine != its:
        differing = sum(mine.get(token) != its.get(token) for token in {*mine, *its})
        raise PlanError(f"[[systems]] {system.name!r} ({system.model}, {len(mine)} tokens) and its reference "
                        f"{reference.name!r} ({reference.model}, {len(its)} tokens) have different tokenizers, "
                        f"{differing} tokens differ, so their ids cannot be compared: name another reference, or none")


def _vocabulary(system: System, places: Places) -> dict[str, int]:
    folder = places.fill(system.model)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise PlanError(f"[[systems]] {system.name!r}: the tokenizer of {folder} cannot be loaded: {error}") from error


def _is_packed(model: transformers.PreTrainedModel) -> bool:
    return isinstance(getattr(model.config, "quantization_config", None), hf_mlspec.MLSpecConfig)
