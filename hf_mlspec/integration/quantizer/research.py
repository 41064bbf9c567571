"""Is a folder one that a research project wrote, which is read and becomes no model, and what can be done with it?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.layer import Stored
from ...checkpoints.qspec import QWEN_TYPE, sort_checkpoint
from ...checkpoints.quarot import MODEL_TYPE
from ..json_object import read_object

_ORDERS = "*_reorder_index_*.pt"  # Atom's, beside the weights


@dataclass(frozen=True)
class Research:
    """What such a folder is. why: it becomes no model. reader: the module that reads and dequantizes it."""

    title: str
    config: Mapping[str, Any]
    why: str
    reader: str

    def refusal(self, folder: str) -> str:
        """What there is to say to whoever wants a model of it."""
        return (
            f"{folder!r} is a checkpoint of {self.title}: {self.why}. {self.reader} checks and dequantizes its "
            "tensors; for a model here, quantize the original one with MLSpecConfig"
        )

    def layers(self, tensors: Mapping[str, Stored]) -> Iterator[tuple[str, int, int, str, str]]:
        """(stored as, weights, bytes, becomes, why it is dense) of every linear layer that is quantized. ValueError or
        TypeError naming a tensor that is missing or does not fit."""
        if self.config.get("model_type") not in (MODEL_TYPE, QWEN_TYPE):
            return
        found = sort_checkpoint(tensors, self.config)
        for layer in found.layers.values():
            plan = found.reader.plan(layer)
            yield plan.stored_as, layer.in_features * layer.out_features, plan.stored_bytes, "no model yet", ""


def research_of(name: str | os.PathLike) -> Research | None:
    """Which one, None for anything but such a folder. Its config.json, and the names of its files, tell. ValueError
    naming a config.json that is damaged."""
    folder = Path(name)
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("model_type") in (MODEL_TYPE, QWEN_TYPE):
        return Research(
            "QuaRot, or QSpec, which has the same layout", config,
            f"its weights were rotated for inputs that are rotated, too, and model_type {config['model_type']!r} "
            "is no model of transformers or of this package", "hf_mlspec.checkpoints.qspec",
        )  # fmt: skip
    orders = next(folder.glob(_ORDERS), None) if folder.is_dir() else None
    if orders is not None:
        return Research(
            "Atom", config,
            f"the inputs of its layers are in the orders of {orders.name}, which no model here takes, and its weights "
            "would be wrong as they are", "hf_mlspec.checkpoints.atom",
        )  # fmt: skip
    return None


def require_no_research(name: str | os.PathLike) -> None:
    """ValueError for a folder of a research project: what it is, and what can be done with it."""
    found = research_of(name)
    if found is not None:
        raise ValueError(found.refusal(os.fspath(name)))
